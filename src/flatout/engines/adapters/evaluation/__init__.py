"""Evaluation: what a trained run answers, and how well.

score_routings   every task's scores under every routing, each pair of adapter and row computed once
predict          one text in, a task and its answer out
results          what an evaluation found, as data and as a file
"""
