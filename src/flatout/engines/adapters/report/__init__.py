"""The report of a run: one HTML page and one picture.

page       the page
curves     losses and scores over the steps
drawings   scores, confusion and calibration as drawings
plots      the same as a picture file
"""
