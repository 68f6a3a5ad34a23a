"""Rules on what happens between the steps: FO801 and up."""
