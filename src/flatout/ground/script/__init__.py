"""A user's script or module, run as Python itself would.

command  what to run, checked before anything starts
main     become it: `__main__`, its path and arguments, its errors without frames of ours
"""
