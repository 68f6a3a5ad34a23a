"""Make a job faster without a change of its code: try, prove, keep.

treatments/    ways to run a job differently, one per file
treatment      what a treatment is, and how one is found
patches/       ways to write the user's source differently, tried as treatments are
outermost      the model that a script trains, met at its first call
child          the process that runs the script: with treatments, and in a trial with a meter
trial/         what a trial sees of its job, in the job's process
step_hooks     calls around optimizers' steps, which may come and go while one is under way
trials         runs of the script, each in a process of its own
verdict        whether a treatment pays, and whether its numbers are right
numbers        what is run to compare numbers
tune           the whole: diagnose, try, keep, drop once, write
results/       flatout.toml, the machine of a proof, the report
run            become the script under the treatments of its prescription
check/         is this source slower than that one

A treatment is kept when its gain is beyond doubt and its numbers are those of the job: not verified is not
passed.
"""
