"""Evaluation: what a trained run answers, and how well.

score_routings   every task's scores under every routing, each pair of adapter and row computed once
predict          the task and the answer of one text
results          what an evaluation found, as data and as a file
"""
