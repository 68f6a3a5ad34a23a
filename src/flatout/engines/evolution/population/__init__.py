"""The members of a population: which weights differ, and by which noise.

weights         the weights that evolve, in stacks of one shape
perturbations   their noise: the factors of any variants at any epoch
"""
