"""What the job's process does beside its steps.

watch         all of these together, as the observer has them
compilation   what torch.compile does, from dynamo's own records
garbage       pauses of Python's garbage collector
threads       how many threads an operator on the CPU uses, and who said so
redirect      its writes, kept out of the user's folders while a tuning runs it
training      losses, parameters without a gradient, schedules of the learning rate
"""
