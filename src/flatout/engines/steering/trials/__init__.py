"""Rows of (trial, question): steered, and turned into numbers or texts.

steering        `Steering`: what a trial does to the residual stream; tables of many of them
steered_model   hooks that steer any transformers model
trial_engine    rows, and what an engine answers about them
packed_trials   the engine: many trials in one batch, over prompts computed once
branches        continuations of few prompts, scored in one forward
hooked_trials   the same answers through a model's own forward, where it cannot be packed
scoring         how a row becomes a number
"""
