"""Directions in the residual stream.

steering_vectors   a unit direction and a mean norm per layer: fitted, saved, loaded
methods            mean difference, PCA, logistic regression, LDA
fit_questions      from questions to the vectors of every method
formats            vectors to and from other libraries
gguf               control vectors as GGUF files
"""
