"""Runs afterwards: the log, its figures, and what is made of them.

history      the log of a run, in three tiers: written, read, followed while another process writes it
playback     the log played again
engine_runs  runs of engines by their log.jsonl, and the list of all runs
outline      a whole run in some hundred points
summary      the figures of a run
compare      the figures of two runs, and which differences are noise
charts       the charts of a run and its figure file
report       the same as one HTML page
"""
