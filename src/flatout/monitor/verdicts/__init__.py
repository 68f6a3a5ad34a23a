"""What bounds a run, in one sentence, with its evidence and what to do next.

verdict  the questions, in order of urgency
window   a verdict and the samples it looks at
alarms   memory that runs out, a job that stands still, clocks held down
change   since when the run has another speed
"""
