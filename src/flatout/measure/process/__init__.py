"""What the job's process does apart from its steps.

watch         all of these together, for the observer
compilation   what torch.compile does, from dynamo's own records
garbage       pauses of Python's garbage collector
threads       how many threads a CPU operator uses, and which line sets it
redirect      keep the job's writes out of the user's folders during a tuning
own_thread    a thread of ours in the job's process, away while it forks
training      losses, parameters without a gradient, learning-rate schedules
"""
