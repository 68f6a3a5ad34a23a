"""Processes that draw trials from one study.

placement   a replica per GPU, shards only where one GPU cannot hold the model
crew        worker processes on this machine
ray_crew    workers on the nodes of a Ray cluster
heartbeat   which workers are alive, told through the study
"""
