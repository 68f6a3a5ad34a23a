"""What a trial sees of its job, in the job's process.

meter      times of steps, losses, gradients, and what ends the script
counts     launches, waits, copies, memory of a few steps: what is the same on every machine
redirect   what the script writes goes to a folder that is thrown away
"""
