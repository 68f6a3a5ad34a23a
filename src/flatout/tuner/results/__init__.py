"""The results of a tuning: what was kept, the machine it was proven on, and the report.

prescription   flatout.toml: what was kept, with its proof
machine        the hardware of a proof, and whether this machine differs
page           a tuning as one HTML page
"""
