"""Rewrite the user's source, prove it like a treatment, and show the diff.

transforms/    ways to rewrite a file, one per file
patch          what a patch is, how one is found, and a file under several of them
source         a file as a tree, and its text after changes
syntax         what a node of the tree reads, binds, changes and calls
purity         what can be computed once instead of many times
joined_lists   loops that only fill a list that one call joins
ragged_pieces  what a loop over samples appends, as pieces of `ragged`
padded_lists   whether sequences are padded with zeros and stacked
serve          serve the patched text in place of the file in a trial, in memory
apply          turn the patches of a prescription into edits of files
"""
