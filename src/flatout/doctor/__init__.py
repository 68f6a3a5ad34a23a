"""From evidence to findings, and the page that shows them.

finding.py     a cause with its place, its figures, its ceiling and its fix
rule.py        the grammar of a rule;  rules/  one rule per file;  rules_page.py  their page in the docs
ceilings.py    turn arms into ceilings, and seconds into shares of the step;  lines.py  the cost of one line
causal_map.py  what the step would take without each block;  source_view.py  the same over the source
loading.py     what is known of a loader: its slow lines, and how many workers could share its work
outside.py     what happens between the steps, as a share of the job
examine.py     apply every rule to one Evidence and rank the findings
readings.py    the sentences that terminal and page share: what bounds the step, what an arm showed
page.py        the diagnosis as one HTML page, with the charts of charts.py

Importing this package imports no torch: any machine can examine a saved Evidence file.
"""
