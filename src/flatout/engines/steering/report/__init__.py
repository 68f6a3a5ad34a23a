"""What a search found.

record         the data of a report, as one JSON file beside the study
charts         heat map, trade-off and intervals; the figure file
page           one HTML page
"""
