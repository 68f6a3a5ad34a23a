"""Several processes that train together, on one machine or on many, measured as one job.

agreement       the ranks switch arms at the same step
exchange        how the evidence of each rank reaches rank 0: a folder both see, else the launcher's store
merging         the evidence of all ranks as one
unsynchronised  an arm: steps that exchange no gradients
network         an all-reduce of two sizes, and the speed of the link it crosses
"""
