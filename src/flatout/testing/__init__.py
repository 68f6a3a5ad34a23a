"""For authors of extensions: contracts as test classes, and a simulated device.

rules, datasheets, evolution_tasks, adapter_tasks, model_families
                one contract each: subclass it in a test, and pytest holds your part to what Flatout relies on
wrong_treatments
                treatments that compute something else: a tuner that keeps one of them is wrong
played_nvml     GPUs that are not there, for tests of what reads NVML
"""
