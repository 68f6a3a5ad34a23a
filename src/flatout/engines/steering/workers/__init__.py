"""Processes that draw trials from one study.

placement         a replica per GPU, shards only where one GPU cannot hold the model
worker_processes  workers on this machine
ray_workers       workers on the nodes of a Ray cluster
heartbeat         which workers are alive, told through the study
"""
