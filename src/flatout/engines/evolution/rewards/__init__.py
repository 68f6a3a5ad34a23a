"""What a completion is worth.

kinds    the kinds of rewards and their names, and the number a text ends with
bleu     sentence BLEU of many rows at once
pool     rewards in other processes, with a time limit per row;  worker  the other side
"""
