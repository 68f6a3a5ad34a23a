"""Samples in the formats of other tools.

choice.py       which sinks a user chose, and those sinks while they are open
figures.py      a Sample as a flat list of numbers, which every sink writes
files.py        JSON lines, CSV, TensorBoard
prometheus.py   Prometheus's text format, and `/metrics` on the loopback
"""
