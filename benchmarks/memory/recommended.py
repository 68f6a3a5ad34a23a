"""What `flatout plan` recommends under every cap that was searched on a GPU, held against what trained there.

    python benchmarks/memory/recommended.py --save          # anywhere: no GPU, up to minutes for each search

Searches that the saved table has are not asked again, so that a run may be stopped and gone on with.

The number is the product's own: settings and a budget go in as a config and a device would make them, with
the cap as what is free, nothing else on the device and a margin of 1, and the largest batch comes out that
`plan show` names and `plan fit` divides the effective batch by.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.memory import estimates
from benchmarks.memory.accuracy import is_near, largest_trained
from benchmarks.memory.configuration import GIB, Configuration
from benchmarks.memory.configurations import every_configuration, unseen_configurations
from benchmarks.memory.preparation import import_everything
from benchmarks.memory.table import RESULTS, latest_table, read_table, write_table
from flatout.ground.decisions import Decision
from flatout.hardware.simulated import simulated_device
from flatout.memory.predict.forecast import CONTEXT_BYTES, Forecaster
from flatout.planner.config.settings import Setting, Settings, StageSettings
from flatout.planner.fit.fits import Budget
from flatout.planner.fit.show import overview

SEARCHES = ("caps", "searches")
Row = dict[str, Any]


def searched() -> Iterator[tuple[Configuration, Row]]:
    """Every search that ended, with its configuration under its cap: a label may end in `@` and its GiB."""
    known = {each.label: each for each in (*every_configuration(), *unseen_configurations())}
    for subject in SEARCHES:
        path = latest_table(subject)
        assert path is not None
        for row in read_table(path)["rows"]:
            label, _, gib = row["label"].partition("@")
            if row.get("fails_at") is None:
                continue
            cap_bytes = int(gib) * GIB if gib else row["cap_bytes"]
            assert cap_bytes == row["cap_bytes"]
            yield dataclasses.replace(known[label], cap_bytes=cap_bytes), row


def settings_of(configuration: Configuration) -> Settings:
    """As a config that starts from one sample, and evaluates at another size than it trains at."""
    recipe, source = configuration.recipe, "the configuration"
    stage = StageSettings(
        name="training",
        batch_size=Setting(value=1, source=source),
        accumulation=Setting(value=recipe.accumulation, source=source),
        precision=Setting(value=recipe.precision, source=source),
        checkpointing=Setting(value=recipe.checkpointing, source=source),
        clip_norm=Setting(value=recipe.clip_norm, source=source),
        eval_batch_size=Setting(value=1, source=source),
        sizes={
            name: Setting(value=size, source=source)
            for name, size in configuration.job.sizes.items()
            if name != "batch_size"
        },
    )
    assert stage.recipe == recipe
    one = Decision(value=1, reason=source, source="computed")
    style = Decision(value="benchmark", reason=source, source="computed")
    return Settings(style=style, ranks=one, stages=(stage,))


def budget_of(configuration: Configuration) -> Budget:
    """The cap is the allocator's, so that the context of the process comes on top of it."""
    assert configuration.cap_bytes is not None
    device = simulated_device(estimates.DEVICE)
    assert device.memory_bytes is not None
    free = configuration.cap_bytes + CONTEXT_BYTES
    return Budget(
        device=device,
        total_bytes=device.memory_bytes,
        free_bytes=Decision(value=free, reason="the cap of a search", source="computed"),
        margin=1.0,
    )


def forecast_of(configuration: Configuration) -> Forecaster:
    return Forecaster(configuration.job, device=simulated_device(estimates.DEVICE))


def recommend(configuration: Configuration) -> Row:
    """The largest batch as `plan show` names it."""
    (stage,) = overview(
        settings_of(configuration),
        budget=budget_of(configuration),
        forecast=forecast_of(configuration),
    ).stages
    assert stage.largest is not None
    return {"recommended": stage.largest.tight, "safe": stage.largest.safe, "caution": stage.caution}


def judged(row: Mapping[str, Any], recommended: int | None) -> Row:
    """Whether it trained, and whether it is within 3 % or one sample of the largest that did."""
    largest = largest_trained(row)
    batch = recommended or 0
    return {"largest": largest, "trains": 0 < batch <= largest, "near": is_near(batch, largest)}


def summarize(rows: Sequence[Mapping[str, Any]]) -> Row:
    return {"count": len(rows), **{key: sum(row[key] for row in rows) for key in ("trains", "near")}}


def save(rows: Sequence[Row]) -> None:
    path = latest_table(SEARCHES[0])
    assert path is not None
    hardware = path.stem.split("_")[1]
    result = {"benchmark": "memory", "estimated_with": estimates.versions(), "summary": summarize(rows)}
    file = RESULTS / f"recommended_{hardware}_{datetime.date.today().isoformat()}.json"
    write_table(file, {**result, "rows": list(rows)})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="searches whose label contains this")
    parser.add_argument("--again", action="store_true", help="also those that the saved table has")
    parser.add_argument("--save", action="store_true", help="write results/recommended_HARDWARE_DATE.json")
    arguments = parser.parse_args()
    import_everything()
    path = latest_table("recommended")
    rows: dict[str, Row] = {} if path is None else {row["label"]: row for row in read_table(path)["rows"]}
    for configuration, row in searched():
        label = row["label"]
        if arguments.only not in label or (label in rows and not arguments.again):
            continue
        start = time.perf_counter()
        found = recommend(configuration)
        rows[label] = {"label": label, **found, **judged(row, found["recommended"])}
        print(f"{label:<90} {rows[label]} {time.perf_counter() - start:.0f} s", flush=True)
        if arguments.save:
            save(list(rows.values()))
    print(json.dumps(summarize(list(rows.values()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
