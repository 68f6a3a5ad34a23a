"""Rules on what is kept alive: FO501 and up."""
