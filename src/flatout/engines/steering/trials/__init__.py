"""Rows of (trial, question): steered, and turned into numbers or texts.

steered_model    `Steering`, and hooks that make any transformers model do it
packed_trials    many trials in one batch: choices scored, texts generated
branches         continuations of few prompts, scored in one forward
hooked_trials    the same answers through a model's own forward, where it cannot be packed
scoring          how a row becomes a number
"""
