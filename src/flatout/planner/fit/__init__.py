"""What fits a device.

budget        the memory that a plan may use
fits          whether a step fits, and the largest batch that does
show          what a config does to a device today
fit_settings  the suggestions for every group of stages, and what to write
search        the search for the batch of one group
covering      which stages need no search of their own
suggestions   what a fit is asked and what it answers
batches       arithmetic of batch, accumulation and effective batch
evaluation    the batch of evaluation
remedies      what would help a job that does not fit
progress      which question a plan is at, and about how much is left
"""
