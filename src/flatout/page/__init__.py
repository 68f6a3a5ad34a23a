"""One look for every HTML page, figure file and terminal text, beneath every room that reports.

printable.py   text of a job made safe for a terminal and a page
markup.py      HTML elements that escape what they hold: tag, section, table, facts
document.py    the whole page: policy, style, masthead, footer;  page.css  its style
tokens.css     every colour, on white and on black
scales.py      from values to places on an axis, and round numbers beside it
charts.py      the charts as data: curves, stack, columns, scatter, RowChart, Matrix
inline.py      charts into a page;  figures.py  charts into PNG and SVG files
"""
