"""One patch per file; its name is the file's with hyphens."""
