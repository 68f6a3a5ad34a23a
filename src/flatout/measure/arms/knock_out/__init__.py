"""Remove a block of the user's own code: how long would the step take if the block were free?

knock_out         the arm, the share of the step that lines hold, and gradients lost with a block
function_blocks   blocks of functions that steps call
leave_out         blocks of the training loop itself, which never returns
blocks            which blocks the source allows to remove
rewrite           a function's code with a switch around a block
kept_results      what a block computed, to stand in for it
roofline          the least time that a block needs
"""
