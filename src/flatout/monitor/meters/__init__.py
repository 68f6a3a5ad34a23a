"""Meters: each is read again and again, and gives the figures since the reading before.

host          CPU, memory, disk and network
gpus          every GPU through NVML, whatever happens to it
gpu_counters  of one GPU: how much of it works, its traffic, its energy
processes     who is on a GPU, and the processes of the job
"""
