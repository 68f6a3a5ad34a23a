"""Reports and live lines for a terminal.

diagnosis   why a job is slow: the step, its arms, the findings
plan        what a step takes, and what fits
progress    how far, how fast and about how long: a live line, or lines in a pipe
"""
