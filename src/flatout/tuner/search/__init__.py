"""The search: what is tried on a job, for how long, and what is kept.

plan         how many steps a trial runs, and how many trials run at once
candidates   what is tried, and in which order
times        how much faster treatments are, in pairs of runs and in blocks of one run
tune         the whole: diagnose, try, keep, drop once, write
"""
