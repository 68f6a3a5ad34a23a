"""What was kept, as entries of flatout.toml: treatments and patches, with their gains and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.ground.documents import show_diff
from flatout.tuner.results.outcome import Tried
from flatout.tuner.results.prescription import Kept, KeptPatch
from flatout.tuner.treatment import Dose


def keep(tried: Tried, *, checked: str) -> Kept:
    """Return the entry of a kept treatment; `checked` says how its numbers were verified."""
    gain = tried.gain
    assert gain is not None
    return Kept(
        name=tried.name,
        value=tried.value,
        safety=tried.safety,
        ratio=gain.ratio,
        low=gain.low,
        high=gain.high,
        checked=checked,
        pays_after=tried.job.pays_after if tried.job is not None else None,
    )


def keep_patches(
    doses: Sequence[Dose], entry_of: Callable[[Dose], Kept]
) -> tuple[tuple[KeptPatch, ...], str]:
    """Return the entries of kept patches, with hashes of their files, and what they change."""
    if not doses:
        return (), ""
    from flatout.tuner.patches.patch import patched_texts, sha256, sites_of

    sites = sites_of(doses)
    texts = patched_texts(sites, folder=Path.cwd())
    kept = []
    for dose, site in zip(doses, sites, strict=True):
        one, (before, after) = entry_of(dose), texts[site.file]
        kept.append(
            KeptPatch(
                name=one.name,
                value=str(site),
                file=site.file,
                sha256=sha256(before),
                patched_sha256=sha256(after),
                safety=one.safety,
                ratio=one.ratio,
                low=one.low,
                high=one.high,
                checked=one.checked,
            )
        )
    return tuple(kept), show_diff(texts)
