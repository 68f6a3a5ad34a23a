"""Rules on Python loops in the model: FO301 and up."""
