"""A causal language model as the products it consists of.

decoder     the model's parts: projections, norms, attention, MLP, blocks
families    reads Hugging Face models of each supported family
stacking    modules that share an input become views of one storage
"""
