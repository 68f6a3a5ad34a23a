"""One look for every HTML page, figure file and terminal text, beneath every room that reports.

printable   text of a job made safe for a terminal and a page
markup      HTML elements that escape what they hold: tag, section, table, facts
document    the whole page: policy, style, masthead, footer
page.css    its style
tokens.css  every colour, on white and on black
scales      from values to places on an axis, and round numbers beside it
charts      the charts as data: curves, stack, columns, scatter, RowChart, Matrix
inline      charts into a page
figures     charts into PNG and SVG files
"""
