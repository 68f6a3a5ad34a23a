"""The report of a run: one HTML page and one figure file.

run_report   what is known of a run, and the sentence it comes to
charts       scores, confusion, calibration and curves
page         the page
"""
