"""From evidence to findings, and the page that shows them.

finding      a cause with its place, its figures, its ceiling and its fix
rule         the grammar of a rule
rules/       one rule per file
rules_page   the page of the docs that lists them
ceilings     turn arms into ceilings, and seconds into shares of the step
lines        the cost of one line of the user's code
loading      what is known of a loader: its slow lines, and how many workers could share its work
outside      what happens between the steps, as a share of the job
examine      apply every rule to one Evidence and rank the findings
causal_map   what the step would take without each block
sentences    what terminal and page both say: what bounds the step, what an arm showed
unexplained  what costs time though no rule names a line for it
report/      the diagnosis as one HTML page

Importing this package imports no torch: any machine can examine a saved Evidence file.
"""
