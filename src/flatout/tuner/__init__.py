"""Make a job faster without a change of its code: try, prove, keep.

treatments/    ways to run a job differently, one per file
treatment      what a treatment is, and how one is found
outermost      the model that a script trains, met at its first call
child          the process that runs the script: with treatments, and in a trial with a meter
trial/         what a trial sees of its job, in the job's process
step_hooks     calls around optimizers' steps, which may come and go while one is under way
trials         arms in alternating processes, and their results
verdict        whether a treatment pays, and whether its numbers are right
prescription   flatout.toml: what was kept, with its proof
machine        the hardware of a proof, and whether this is another machine
page           a tuning as one HTML page
tune           the whole: diagnose, try, keep, drop once, write

A treatment is kept when its gain is beyond doubt and its numbers are those of the job: not verified is not
passed.
"""
