"""What adapters are trained on.

task        the contract: rows, tokens and targets, head, loss and scores of one task
known       tasks by name: of this folder, of installed packages, of a folder of the user's
data_rows   where rows come from, and their splits
metrics     scores of texts, in points
decoder     the small transformer that tasks share to write text
generation  what tasks that write have in common
kinds/      the tasks that come with Flatout, one file each
"""
