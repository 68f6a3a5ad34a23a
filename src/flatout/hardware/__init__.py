"""Device facts: what NVML, the host and the vendors' datasheets say, and devices that are not there.

device          a Device: one GPU, real or simulated
simulated       a Device that is not here, by its name or its memory
datasheet       what vendors promise of a GPU
datasheet_rows  the table of their promises
matching        from a name to its row of that table
nvml            snapshots of all GPUs
nvml_questions  single questions to NVML
snapshot        what NVML answered
visible         the meaning of CUDA_VISIBLE_DEVICES
ray_cluster     the nodes of a Ray cluster, and functions run there
host            the cores and memory a job may use
cgroup          the limits of a container

Nothing here imports torch, and NVML's bindings are imported only when GPUs are read.
"""
