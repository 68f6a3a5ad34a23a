"""A training config: its files, its knobs, and edits of their characters.

config_text  config text with the position of every value, and new values put there
job_config   files merged in order, one view per stage
hydra        which files a `defaults` list names
knobs        where the knobs live: styles, mapping file, --knob
settings     the knobs of every stage as numbers, with ranks and sizes
lengths      how long the sequences of a data set are
backups      edits of several files shown, written as one, and taken back
"""
