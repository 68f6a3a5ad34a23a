"""A block of the user's own code left out: how long the step would take if it were free.

knock_out         the arm, how much of the step lines hold, and gradients that are lost with a block
function_blocks   blocks of functions that steps call
leave_out         blocks of a training loop that runs all the while
blocks            which blocks can be taken away, by their words
rewrite           a function's code with a switch around a block
kept_results      what a block computed, given in its place
roofline          what a block must take at least
"""
