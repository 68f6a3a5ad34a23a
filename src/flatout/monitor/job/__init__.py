"""A job that reports its steps, and the monitor's view of it.

watch         `flatout.watch`: the loop of a job under watch
run_script    `flatout watch --run`: becomes an unmodified script
last_words    what such a script leaves behind when a signal or a crash ends it
autopatch     watches the loaders and optimizers of such a script
reporter      counts steps and times waits
torch_device  what the job's torch tells of its GPU
channel       the small file through which both sides talk
job_meter     the monitor's end: the channel, read twice, gives figures
"""
