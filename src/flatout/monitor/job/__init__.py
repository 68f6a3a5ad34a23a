"""A job that reports its steps, and the monitor's view of it.

watch.py         `flatout.watch`: the loop of a job under watch
run_script.py    `flatout watch --run`: becomes an unmodified script
last_words.py    what such a script leaves behind when a signal or a crash ends it
autopatch.py     watches the loaders and optimizers of such a script
reporter.py      counts steps and times waits;  torch_device.py  what the job's torch tells of its GPU
channel.py       the small file through which both sides talk
job_meter.py     the monitor's end: the channel, read twice, gives figures
"""
