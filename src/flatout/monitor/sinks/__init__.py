"""Samples in the formats of other tools.

choice.py       which sinks a user chose, and those sinks while they are open
figures.py      a Sample as a flat list of numbers, which every sink writes
jsonl.py, csv.py, tensorboard.py, prometheus.py (endpoint.py serves it)
"""
