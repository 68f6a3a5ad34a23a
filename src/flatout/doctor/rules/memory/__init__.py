"""Rules of what is kept alive: FO501 and on."""
