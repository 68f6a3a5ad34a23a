"""The tasks that come with Flatout, one file each, found by being here.

sentiment, qa, summarisation, code_generation, translation    the five tasks of the product
classification, regression, similarity                        kinds for rows of your own
"""
