"""Rules on training itself: FO901 and up.  These mistakes cost no time, so they have no ceiling."""
