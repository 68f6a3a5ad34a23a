"""A diagnosis as one HTML page.

page         the page: what ran, what bounds the step, what each cause is worth, what was measured
charts       its charts: counterfactuals with their intervals, and every observed step
source_view  the causal map over the user's source
"""
