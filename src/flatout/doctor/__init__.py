"""From evidence to findings, and the page that shows them.

finding.py     a cause with its place, its figures and its ceiling
rule.py        the grammar of a rule;  rules/  one rule per file;  rules_page.py  their page in the docs
ceilings.py    seconds into shares of the step and ceilings;  lines.py  what one line of code costs per step
outside.py     what happens between the steps, as a share of the job
examine.py     every rule over one Evidence, findings ranked
readings.py    the sentences that terminal and page share: what bounds the step, what an arm showed
page.py        the diagnosis as one HTML page, with the charts of charts.py

Importing this package imports no torch: a saved Evidence file is examined on any machine.
"""
