"""What fits a device.

fits          the budget of a device, whether a step fits it, and the largest batch that does
show          what a config does to a device today
fit_settings  the suggestions for every group of stages, and what to write
search        the search for the batch of one group
suggestions   what a fit is asked and what it answers; arithmetic of batches
remedies      what would help a job that does not fit
fit_job       the largest batch of Python objects, as a call
progress      which question a plan is at, and about how much is left
"""
