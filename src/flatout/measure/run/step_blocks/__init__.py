"""Which steps serve which instrument and which arm.

schedule    how many steps of each, and which arm deserves the next
sequence    the blocks of one job: those planned ahead, then the next one as long as there is time
deadline    how long a diagnosis and each of its blocks may take
"""
