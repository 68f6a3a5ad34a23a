"""Meters: each is read again and again, and gives the figures since the reading before.

host.py        CPU, memory, disk and network
gpus.py        every GPU through NVML, whatever happens to it
gpm.py         how much of a GPU works (Hopper and later);  pcie.py  its traffic;  energy.py  its joules
processes.py   who is on a GPU, and the processes of the job
"""
