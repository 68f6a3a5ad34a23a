"""Make a job faster without changing its code: try, prove, keep.

treatments/  ways to run a job differently, one per file
treatment    what a treatment is, and how one is found
patches/     ways to rewrite the user's source, tried like treatments
first_call   the first call of a model that a script trains
child        the process that runs the script: with treatments, and in a trial with a meter
trial/       what a trial observes in the job's process
step_hooks   calls around optimizer steps that may be added and removed during a step
trials       runs of the script, each in a process of its own
verdict      whether a treatment pays, and whether its numbers are right
numbers      the runs that compare numbers
search/      a whole tuning: what is tried, in which order and for how long, and what is kept
results/     the answer of a tuning, flatout.toml, the machine of a proof, the report
run          become the script under the treatments of its prescription
check/       is this source slower than that one

A treatment is kept if its gain is beyond doubt and its numbers are those of the job.  A treatment that was
not verified has not passed.
"""
