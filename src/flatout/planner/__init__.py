"""Training configs that fit a GPU.

config    read a config with the place of every value, and write values back
fit       what fits a device: overview, search, suggestions
forecast  the memory side of a plan, with its cache of traces
plan.py   the answers of `plan show` and `plan fit`
"""
