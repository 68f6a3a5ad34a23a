"""Rules on transfers, waits, and the time between the phases: FO201 and up."""
