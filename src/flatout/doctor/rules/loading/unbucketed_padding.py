"""FO104 unbucketed-padding

What it does
Finds ragged samples that are batched without regard to their length. Every sample is padded to the longest
in its batch, and the model computes the padding like any other position.

Why it costs
One long sample sets the size of its whole batch: if lengths are spread evenly from 1 to N and batched at
random, almost half of all positions are padding. Matrix products take time in proportion to positions,
attention in proportion to their square, and none of it reaches the loss.

Evidence
Flatout measures two figures on the job's own samples: the share of padded positions as batched, and the
share if batches were cut from the same samples sorted by length. They must differ by at least 10 points.
The saved positions are weighted by the share of the step spent in the layers' own work (matrix products,
attention, convolutions, normalisation), and at least 5 % of the step must remain; a job that takes as long
on half its batch is left alone. The ceiling is measured: steps whose batches are cut to the length that
sorted batches would have. Samples that are already padded to one length hide their real lengths; for those,
the evidence is the gain of steps whose batches are cut to their longest row, or sorted by length and cut.

Fix
Draw batches from samples of similar length: shuffle, sort within chunks of some 50 batches, cut batches,
shuffle the batches, and pass them as `batch_sampler`. Cutting by a token budget instead of a number of
samples also fills the device evenly.

```diff
-loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=pad)
+order = torch.randperm(len(dataset)).split(50 * 64)                                # chunks of 50 batches
+sorted_chunks = [sorted(chunk.tolist(), key=length_of) for chunk in order]
+batches = [chunk[i : i + 64] for chunk in sorted_chunks for i in range(0, len(chunk), 64)]
+random.shuffle(batches)
+loader = DataLoader(dataset, batch_sampler=batches, collate_fn=pad)
```

Fix safety
Lossy: each sample is still seen once per epoch, but batches have different members, so gradients differ and
a loss averaged over positions weighs samples differently. Compare loss curves.
"""

from __future__ import annotations

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, rows_cost_nothing, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.loading import made_by
from flatout.doctor.rule import title_of
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence, Kernels, Lengths, Loader

ARMS = ("trimmed",)
RULE = title_of(__doc__, arms=ARMS)
LEAST_POINTS = 0.10
LEAST_SHARE = 0.05
# What layers do to every position.  Elementwise work is excluded: much of it belongs to loops, gradients and
# the optimizer, and a share that is too small is merely modest.
DENSE = ("matmul", "attention", "convolution", "normalisation")


def detect(evidence: Evidence) -> list[Finding]:
    return _detect_by_lengths(evidence) or _detect_shared(evidence)


def _detect_shared(evidence: Evidence) -> list[Finding]:
    """Find padding that samples bring along, so that real lengths are unknown: by the gain without it."""
    gains = {
        each.label: each
        for each in evidence.counterfactuals
        if each.kind == ARMS[0] and each.speedup_low >= RESOLVABLE_SPEEDUP
    }
    findings = []
    for loader in evidence.loaders:
        if not loader.trains or not gains:
            continue
        if ARMS[0] in gains:
            findings += RULE.proven(
                evidence,
                loader.place,
                "every row of its batches is padded beyond the longest row",
                figures=(),
                share=1 - 1 / gains[ARMS[0]].speedup,
                fix="pad each batch to its longest row in collate_fn, instead of every sample to one length",
                safety="reordered",
            )
        elif loader.lengths is None:
            findings += RULE.proven(
                evidence,
                loader.place,
                "rows of its batches are padded to a common length that only some of them fill",
                figures=(),
                share=1 - 1 / max(each.speedup for each in gains.values()),
                fix=f"{_fix(loader)}, and pad each batch to its longest row in collate_fn",
            )
    return findings


def _detect_by_lengths(evidence: Evidence) -> list[Finding]:
    scaling = _share_that_grows_with_positions(evidence)
    if scaling is None or rows_cost_nothing(evidence):
        return []
    findings = []
    for loader in evidence.loaders:
        lengths = loader.lengths
        if not loader.trains or lengths is None:
            continue
        if lengths.padded_share - lengths.bucketed_share < LEAST_POINTS:
            continue
        share = scaling * _positions_saved(lengths)
        if share >= LEAST_SHARE:
            findings += _finding(evidence, loader, lengths, share=share, scaling=scaling)
    return findings


def _share_that_grows_with_positions(evidence: Evidence) -> float | None:
    kernels: Kernels | None = evidence.kernels
    if kernels is None:
        return None
    return share_of(sum(kernels.by_category_s.get(name, 0.0) for name in DENSE), kernels.step_s)


def _positions_saved(lengths: Lengths) -> float:
    """Return the share of the computed positions that sorted batches would not have."""
    if lengths.bucketed_share >= 1:
        return 0.0
    return 1 - (1 - min(lengths.padded_share, 1.0)) / (1 - lengths.bucketed_share)


def _finding(
    evidence: Evidence, loader: Loader, lengths: Lengths, *, share: float, scaling: float
) -> list[Finding]:
    sorted_share = show_share(lengths.bucketed_share)
    return RULE.proven(
        evidence,
        loader.place,
        f"{show_share(lengths.padded_share)} of all positions are padding; batches of similar length "
        f"would leave {sorted_share}",
        figures=(
            f"lengths of {lengths.num_samples} samples: mean {lengths.mean:.0f}, longest {lengths.max}",
            f"padding: {show_share(lengths.padded_share)} as batched, {sorted_share} sorted by length",
            f"{show_share(scaling)} of the step grows with the number of positions",
        ),
        share=min(share, 1.0),
        fix=_fix(loader),
    )


def _fix(loader: Loader) -> str:
    if made_by(loader) == "transformers":
        return 'give TrainingArguments train_sampling_strategy="group_by_length"'
    return "pass this DataLoader a batch_sampler that cuts batches from samples of similar length"
