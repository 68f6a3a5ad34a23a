"""Is a tuning right?  What it gains on planted faults, and what it never keeps.

    python benchmarks/tuning/run.py [--only PART[/ITEM]] [--save]

Parts: planted (gains beside mending by hand), decoys (clean twins, and scripts where common advice is wrong),
wrong (planted wrong treatments under every class), traps, noise (A/A comparisons, beside a peer's rule on the
same trials), cost (one run or pairs of runs).
Each finished item is a line of the state file, with its date and revision, and is not run again: an
interrupted run goes on, and a result file may hold items of several days.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
from interleaved import arguments, report  # noqa: E402
from planted import ENOUGH, decoy_items, planted_items  # noqa: E402
from proofs import cost_items, noise_items, noise_summary, trap_items, wrong_items  # noqa: E402

Item = dict[str, Any]
Parts = dict[str, dict[str, Callable[[], Item]]]
FALSE_KEEPS = 0.02
STATE = HERE.parents[1] / ".flatout" / "tuning.jsonl"


def parts_of(options: Any) -> Parts:
    return {
        "wrong": wrong_items(),
        "traps": trap_items(),
        "cost": cost_items(),
        "noise": noise_items(8 if options.quick else options.comparisons),
        "decoys": decoy_items(seconds=options.seconds),
        "planted": planted_items(seconds=options.seconds, allow_lossy=options.allow_lossy),
    }


def run(parts: Parts, *, only: list[str], state: Path, quick: bool) -> dict[str, dict[str, Item]]:
    """Run what is not known yet; a failure is told and tried again the next time."""
    done = read(state)
    for part, items in parts.items():
        for name, act in list(items.items())[: 2 if quick and part in ("planted", "decoys") else None]:
            if only and part not in only and f"{part}/{name}" not in only:
                continue
            if name in done.get(part, {}):
                continue
            began_s = time.monotonic()
            try:
                item = act()
            except Exception as error:  # noqa: BLE001 - one item that fails does not cost the others
                say(f"{part}/{name}: {type(error).__name__}: {error}")
                continue
            item |= {"took_s": time.monotonic() - began_s, **stamp()}
            done.setdefault(part, {})[name] = item
            state.parent.mkdir(parents=True, exist_ok=True)
            with state.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, "name": name, "item": item}) + "\n")
            say(f"{part}/{name}: {item['took_s']:.0f} s")
    return done


def stamp() -> Item:
    """When an item was measured, with which revision of the source, and how busy the machine was."""
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None
    return {
        "date": datetime.date.today().isoformat(),
        "revision": revision,
        "load_1min": round(os.getloadavg()[0], 1),
    }


def read(state: Path) -> dict[str, dict[str, Item]]:
    found: dict[str, dict[str, Item]] = {}
    for line in state.read_text(encoding="utf-8").splitlines() if state.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by an interrupt
            continue
        found.setdefault(entry["part"], {})[entry["name"]] = entry["item"]
    return found


def summarise(done: dict[str, dict[str, Item]]) -> dict[str, Any]:
    """One line for every part that was run, and whether its goal is met."""
    rows: dict[str, Any] = {}
    wrong = done.get("wrong", {})
    if wrong:
        mistakes = [item for item in wrong.values() if item["is_wrong"]]
        rows["wrong"] = {
            "planted": len(mistakes),
            "rejected": sum(item["right"] for item in mistakes),
            "passed_by_a_peers_loss_rule": sum(item["peer_passes"] for item in mistakes),
            "right_ones": len(wrong) - len(mistakes),
            "right_ones_passed": sum(item["right"] for item in wrong.values() if not item["is_wrong"]),
            "met": all(item["right"] for item in wrong.values()),
        }
    for part in ("traps", "decoys"):
        if done.get(part):
            right = sum(item["right"] for item in done[part].values())
            rows[part] = {"items": len(done[part]), "right": right, "met": right == len(done[part])}
    if done.get("noise"):
        found = noise_summary(done["noise"])
        num = sum(found[kind]["comparisons"] for kind in ("in_one_run", "pairs_of_runs"))
        kept = sum(found[kind]["kept"] for kind in ("in_one_run", "pairs_of_runs"))
        share = kept / num if num else None
        rows["noise"] = {
            **found,
            "comparisons": num,
            "false_keeps": share,
            "met": share is not None and share <= FALSE_KEEPS,
        }
    cost = done.get("cost", {})
    if len(cost) == 2:
        one, pairs = cost["in one run"], cost["pairs of runs"]
        rows["cost"] = {
            "times_cheaper": pairs["seconds_per_decision"] / one["seconds_per_decision"],
            "in_one_run": one,
            "pairs_of_runs": pairs,
            "same_answers": sum(one["answers"].get(name) == each for name, each in pairs["answers"].items()),
        }
    if done.get("planted"):
        enough = sum(item["share"] >= ENOUGH for item in done["planted"].values())
        rows["planted"] = {
            "items": len(done["planted"]),
            "enough": enough,
            "met": enough == len(done["planted"]),
        }
    return rows


def show(done: dict[str, dict[str, Item]], rows: dict[str, Any]) -> None:
    for name, item in sorted(done.get("planted", {}).items()):
        means = ", ".join(item["kept"]) or "nothing kept"
        print(
            f"{name:32} tuned {item['tuned']:6.2f}x  by hand {item['by_hand']:6.2f}x"
            f"  share {item['share']:5.2f}  {means}"
        )
    for part in ("wrong", "traps", "decoys"):
        for name, item in done.get(part, {}).items():
            words = item.get("answer") or ", ".join(item.get("kept", ())) or "nothing kept"
            print(f"{part:7} {name:34} {'ok ' if item['right'] else 'BAD'} {words}: {item.get('reason', '')}")
    for part, row in rows.items():
        print(f"{part}: {json.dumps(row)}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="PART[/ITEM]", help="repeatable")
    parser.add_argument("--comparisons", type=int, default=200, help="of nothing with nothing (default: 200)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for a diagnosis (default: 30)")
    parser.add_argument("--allow-lossy", action="store_true", help="try lossy treatments on planted scripts")
    parser.add_argument("--state", type=Path, default=STATE, help="file of finished items")
    parser.add_argument("--list", action="store_true", help="name the items and run none")
    options = parser.parse_args()
    parts = parts_of(options)
    if options.list:
        print("\n".join(f"{part}/{name}" for part, items in parts.items() for name in items))
        return
    done = run(parts, only=options.only, state=options.state, quick=options.quick)
    rows = summarise(done)
    show(done, rows)
    report("tuning", {"rows": rows, "items": done}, folder=HERE, save=options.save)


if __name__ == "__main__":
    main()
