"""What a terminal shows: one live line under a job, or a view that fills the screen.

live_line.py     the line;  standing_line.py  keeps a line under what the job prints
follow.py        samples as they come: as a full screen that obeys keys, or as lines
keyboard.py      reads keys;  view.py  what each key does
screen.py        the view as one picture;  panels.py  its parts, curves in one row among them
"""
