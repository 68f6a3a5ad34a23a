"""Rules on the data path: FO101 and up."""
