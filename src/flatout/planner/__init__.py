"""Training configs that fit a GPU.

plan       `plan show` and `plan fit`: from a config's files to an answer and its edits
config/    read a config with the place of every value, and write values back
fit/       what fits a device: overview, search, suggestions
forecast/  the forecast of a job named on the command line, and its cache of traces
"""
