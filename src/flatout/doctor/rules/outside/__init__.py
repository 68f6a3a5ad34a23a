"""Rules of what happens between the steps: FO801 and on."""
