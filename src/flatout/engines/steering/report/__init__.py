"""What a search found.

record         the data of a report, as one JSON file beside the study
study_record   an Optuna study as that data
page           one HTML page
drawings       its pictures
grid           layer by strength as a heat map
plots          a PNG or SVG
"""
