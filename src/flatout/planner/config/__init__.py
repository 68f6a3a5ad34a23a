"""A training config: its files, its knobs, and edits of their characters.

documents   config text with the position of every value
job_config  files merged in order, one view per stage
hydra       which files a `defaults` list names
knobs       where the knobs live: styles, mapping file, --knob
settings    the knobs of every stage as numbers
opened      a config with its style, mapping and overrides
ranks       how many processes train together
lengths     how long the sequences of a data set are
edits       new values in place of old ones, everything else byte for byte
files       several files written as one
backups     write a plan into a config, and take it back
"""
