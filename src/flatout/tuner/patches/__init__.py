"""Rewrite the user's source, prove it as a treatment is proven, and show the diff.

transforms/    ways to write a file differently, one per file
patch          what a patch is, how one is found, and a file under several of them
source         a file as a tree, and another text made of it
nodes          what a node of the tree reads, binds, changes and calls
purity         what can be computed once instead of many times
collected      loops that only fill a list which one call joins
pieces         what a loop over samples appends, as pieces of `ragged`
padded         whether sequences are padded with zeros and stacked
serve          in a trial: the patched text in place of the file, in memory
apply          the patches of a prescription as edits of files
"""
