"""Rules on torch.compile: FO601 and up."""
