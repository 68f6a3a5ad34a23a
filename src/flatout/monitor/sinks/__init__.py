"""Samples in the formats of other tools.

choice      which sinks a user chose, and those sinks while they are open
figures     a Sample as a flat list of numbers, which every sink writes
files       JSON lines, CSV, TensorBoard
prometheus  Prometheus's text format, and `/metrics` on the loopback
"""
