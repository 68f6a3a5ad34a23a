"""`python -m flatout`, for environments whose script folder is not on the PATH."""

from __future__ import annotations

from flatout.cli.app import main

if __name__ == "__main__":
    main()
