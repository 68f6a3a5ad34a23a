"""A job under observation.

launch        start the job in a child process, and leave nothing of it behind
child         the entry point of that process
lineage       parents and children: orphans, death signals, exit codes between the two
session       run the script as `__main__` and end it when enough is known
loop          the same for a loop given as a function, in this process
observer      count the job's steps, and turn instruments and arms on for theirs
steps         where a step ends, and `flatout.step()`
step_blocks/  which steps serve which instrument and which arm, and for how long
step_rows     the recorded steps
passes        the instruments that slow a job down, each on for the few steps of its pass
ranks/        several processes of one job, on one machine or many
episodes      time outside the typical step: evaluations, rollouts, checkpoints, set-up
assemble      turn the notes into one Evidence document
"""
