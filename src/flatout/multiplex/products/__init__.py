"""Products of one input with a shared weight and the factors of many variants.

linear      one linear map, another low-rank variant of it for each row; a torch operator with a derivative
"""
