"""Rules on how the device computes: FO401 and up."""
