"""Runs afterwards: the log, its figures, and what is made of them.

history.py    the log of a run, in three tiers: written, read, followed while another process writes it
playback.py   the log played again
engine_runs.py  runs of engines by their log.jsonl, and the list of all runs
recorded.py   a whole run in some hundred points;  summary.py  its figures;  compare.py  of two runs
charts.py     the charts of a run and its figure file;  report.py  one HTML page
"""
