"""What a completion is worth.

kinds    what a reward is, those that come with Flatout, and the number a text ends with
given    rewards as users give them: names, functions of their own, several with weights
bleu     sentence BLEU of many rows at once
pool     rewards in other processes, with a time limit per row;  worker  such a process
"""
