"""Device facts: what NVML, the host and the vendors' datasheets say, and devices that are not there.

device.py      a Device: one GPU, real or simulated;  simulated.py  one by its name or its memory
datasheet.py   what vendors promise;  datasheet_rows.py  the table;  matching.py  a name to its row
nvml.py        snapshots of all GPUs;  nvml_questions.py  single questions to NVML;  snapshot.py  the answers
visible.py     the meaning of CUDA_VISIBLE_DEVICES
ray_cluster.py the nodes of a Ray cluster, and functions run there
host.py        the cores and memory a job may use;  cgroup.py  the limits of a container

Nothing here imports torch, and NVML's bindings are imported only when GPUs are read.
"""
