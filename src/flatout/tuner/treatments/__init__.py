"""One treatment per file; its name is the file's with hyphens."""
