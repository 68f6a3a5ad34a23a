"""Products of one input with a shared weight and the factors of many variants.

ranges          thin products over ranges of rows or tokens, in four ways, and the choice among them
linear          one linear map, another variant of it for each row: a torch operator with a derivative
trained         linear maps whose factors are trained, the gradients added where the caller keeps them
side_stream     work beside the current stream of a GPU
"""
