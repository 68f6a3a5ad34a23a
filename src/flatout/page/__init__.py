"""One look for every HTML page, picture and terminal text; beneath every room that reports.

printable   text of a job made safe for a terminal
markup      HTML elements that escape what they hold
document    the whole page: policy, style sheet, write
tokens.css  every colour; page.css, the style of all pages
"""
