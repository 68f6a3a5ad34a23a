"""Is this source slower than that one?

trees      the source of a git revision beside the working tree, with the same data
check      runs of both that alternate, and the counts of their steps; or against what was saved elsewhere
answer     ok, slower or cannot tell, and the smallest change that could have been seen
"""
