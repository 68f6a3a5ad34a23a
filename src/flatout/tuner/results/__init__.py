"""The results of a tuning: its answer, what was kept, the machine it was proven on, and the report.

outcome        every treatment with what came of it
kept           what was kept, as entries of a prescription
prescription   flatout.toml: what was kept, with its proof
machine        the hardware of a proof, and whether this machine differs
page           a tuning as one HTML page
"""
