"""Rules of Python loops in the model: FO301 and on."""
