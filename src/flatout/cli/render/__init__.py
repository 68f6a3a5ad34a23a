"""Reports for a terminal.

diagnosis   why a job is slow: the step, its arms, the findings
plan        what a step takes, and what fits
"""
