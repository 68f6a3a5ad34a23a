"""Rules of how the device computes: FO401 and on."""
