"""Routing: which adapter a text needs.

features   what the router sees of a text, computed once and kept
router     features to adapters, with a calibrated confidence
losses     what the router is trained for
quality    accuracy, confusion, load and calibration of a router on rows whose tasks are known
"""
