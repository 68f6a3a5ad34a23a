"""Rules of the data path: FO101 and on."""
