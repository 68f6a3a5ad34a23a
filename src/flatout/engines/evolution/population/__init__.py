"""The members of a population: which weights differ, and by which noise."""
