"""Rules of torch.compile: FO601 and on."""
