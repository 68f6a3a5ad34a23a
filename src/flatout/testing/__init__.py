"""For whoever extends Flatout from a package of their own: contracts as test classes, and a simulated device.

rules, datasheets, evolution_tasks, adapter_tasks, model_families
                one contract each: subclass it in a test, and pytest holds your part to what Flatout relies on
played_nvml     GPUs that are not there, for tests of what reads NVML
"""
