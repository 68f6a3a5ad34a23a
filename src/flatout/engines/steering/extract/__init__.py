"""The residual stream of many texts at many layers.

activations    `extract`: texts or pairs in, values [texts, layers, width] out
tokens         texts as token numbers, each distinct one once, tokenised ahead of the device
positions      which token of a text stands for it
batches        what has to be computed, cut into batches that fit
layer_reader   one pass that reads every wanted layer and stops after the last
async_copy     results copied to the host while the device works
store          activations on disk, found again by their content; when storing beats recomputing
store_index    what a store's folder holds
tiers          blocks of a store in the fastest memory that has room
"""
