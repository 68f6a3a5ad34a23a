"""Rules of several processes that train together: FO701 and on."""
