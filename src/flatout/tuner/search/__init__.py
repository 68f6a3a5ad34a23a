"""The search: what to try on a job, for how long, and what to keep.

plan         how many steps a trial runs, and how many trials run at once
candidates   what to try, and in which order
times        how much faster treatments are, in pairs of runs and in blocks of one run
ahead        what is most likely asked next, for idle nodes
tune         a whole tuning: diagnose, try, keep, drop once, write
"""
