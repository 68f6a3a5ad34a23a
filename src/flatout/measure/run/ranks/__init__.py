"""Several processes that train together, on one machine or on many, measured as one job.

agreement       make the ranks switch arms at the same step
exchange        carry the evidence of each rank to rank 0: by a shared folder, else the launcher's store
merging         merge the evidence of all ranks
unsynchronised  an arm: steps that exchange no gradients
other_trainers  what trains in processes that the script starts itself
network         an all-reduce of two sizes, and the speed of the link it crosses
"""
