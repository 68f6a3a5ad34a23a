"""Rules of calls that make the host wait for the GPU, and of debugging aids: FO221 and on."""
