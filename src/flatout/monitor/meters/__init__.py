"""Meters: each is read again and again, and gives the figures since the reading before.

host.py          CPU, memory, disk and network
gpus.py          every GPU through NVML, whatever happens to it
gpu_counters.py  of one GPU: how much of it works, its traffic, its energy
processes.py     who is on a GPU, and the processes of the job
"""
