"""What a terminal shows: one live line under a job, or a view that fills the screen.

live_line      the line and its words
standing_line  keeps a line under what the job prints
follow         samples as they come: as a full screen that obeys keys, or as lines
keyboard       reads keys
view           what each key does
screen         the view as one picture
panels         parts of that picture, curves in one row among them
"""
