"""What a completion is worth.

kinds        what a reward is, those that come with Flatout, and the number a text ends with
make_reward  a reward from what users give: a name, a function of their own, several with weights
bleu         sentence BLEU of many rows at once
pool         rewards in other processes, with a time limit per row
worker       such a process
"""
