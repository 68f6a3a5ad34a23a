"""Rules on calls that make the host wait for the GPU, and on debugging aids: FO221 and up."""
