"""Rules of training itself, met on the way: FO901 and on.  They cost no time, and have no ceiling."""
