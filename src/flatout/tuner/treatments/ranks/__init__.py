"""What several processes of one job exchange."""
