"""What a trial sees of its job, in the job's process.

meter      times of steps, losses, gradients, and what ends the script
redirect   what the script writes goes to a folder that is thrown away
"""
