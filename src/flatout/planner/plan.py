"""The answers of `plan show` and `plan fit` with what they were asked: one versioned document each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout.codec import encode
from flatout.planner.fit.progress import silent

if TYPE_CHECKING:
    from flatout.planner.config.backups import FileEdit
    from flatout.planner.config.lengths import Lengths
    from flatout.planner.config.opened import OpenedConfig
    from flatout.planner.fit.show import Overview
    from flatout.planner.fit.suggestions import Fit
    from flatout.planner.forecast.load import ForecastRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigPlan:
    """A config and what it does to a device."""

    opened: OpenedConfig
    overview: Overview
    request: ForecastRequest | None = None  # what memory was asked for with
    missing: str | None = None  # why there is no memory to show
    lengths: Lengths | None = None

    def to_json(self) -> dict[str, Any]:
        budget = self.overview.budget
        return {
            **_document("flatout-plan", self.opened, self.request),
            **encode(self.overview),
            "usable_bytes": None if budget is None else budget.usable_bytes,
            "has_findings": self.overview.has_findings,
            "missing": self.missing,
            "lengths": self.lengths
            and self.lengths.to_json(stage.batch_size.value for stage in self.overview.settings.stages),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFit:
    """A config made to fit, not yet written."""

    opened: OpenedConfig
    fit: Fit
    request: ForecastRequest
    choose: str | None = None
    lengths: Lengths | None = None

    @property
    def batch_sizes(self) -> list[int]:
        """Of the chosen suggestions."""
        return [group.suggestion(self.choose).batch_size for group in self.fit.groups]

    def edits(self) -> tuple[FileEdit, ...]:
        """What the chosen suggestion changes in the files; BadInput where there is no place for it."""
        from flatout.planner.config.backups import plan_edits
        from flatout.planner.fit.fit_settings import changes_of

        return plan_edits(self.opened.config, changes_of(self.fit, choose=self.choose))

    def to_json(self) -> dict[str, Any]:
        return {
            **_document("flatout-fit", self.opened, self.request),
            **encode(self.fit),
            "usable_bytes": self.fit.budget.usable_bytes,
            "chosen": [group.suggestion(self.choose).names[0] for group in self.fit.groups],
            "lengths": self.lengths and self.lengths.to_json(self.batch_sizes),
        }


def _document(name: str, opened: OpenedConfig, request: ForecastRequest | None) -> dict[str, Any]:
    return {
        "format": name,
        "version": 1,
        "flatout_version": flatout.__version__,
        "config": str(opened.config.path),
        "model": request and request.model,
        "expandable_segments": request and encode(request.segments),
        "native": request and request.native,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What `plan show` and `plan fit` share."""

    model: str | None = None
    task: str | None = None
    make_batch: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    margin: float = 0.85
    ranks: int | None = None
    mapping_file: Path | None = None
    knobs: Sequence[str] = ()
    overrides: Sequence[str] = ()
    lengths: Path | None = None
    profile: bool = False
    native: bool = False
    expandable_segments: bool | None = None  # None: as the environment sets the allocator
    cache: bool = True  # of traces, in a folder of the user's
    on_progress: Callable[[str], None] = silent
