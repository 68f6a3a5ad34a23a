"""Is this source slower than that one?

trees      the source of a git revision beside the working tree, with the same data
check      alternate runs of both and count their steps, or compare with a saved result
answer     ok, slower or cannot tell, and the smallest change that could have been seen
"""
