"""Random numbers that are a pure function of where they stand, the same on every device.

philox      random words from a counter and a key
draws       normal and uniform numbers by table; the factors and vectors of a population
"""
