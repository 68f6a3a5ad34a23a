"""What bounds a run, in one sentence, with its evidence and what to do next.

verdict.py   the questions, in order of urgency;  window.py  a verdict and the samples it looks at
alarms.py    memory that runs out, a job that stands still, clocks held down
change.py    since when the run has another speed
"""
