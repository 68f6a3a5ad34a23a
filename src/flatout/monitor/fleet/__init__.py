"""Many nodes seen from one place: each keeps or serves its own, and nothing is kept here.

logs   the log of a node: a folder that all see, or the page that the node serves
nodes  the nodes of some sources, each with its last minute
table  one line per node, in a terminal, as text or as JSON
"""
