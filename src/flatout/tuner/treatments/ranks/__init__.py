"""What several processes of one job say to each other."""
