"""What adapters are trained on: one file per task, found by being here.

task               the contract: rows, tokens and targets, head, loss and scores of one task
known              tasks by name: of this folder, of installed packages, of a folder of the user's
rows               where rows come from, and their splits
metrics            scores of texts, in points
decoder            the small transformer that tasks which write share
generation         what those tasks have in common
sentiment, qa, summarisation, code_generation, translation    the five tasks of the product
classification, regression, similarity                        kinds for rows of the user's
"""
