"""How memory is placed, and what the forward keeps."""
