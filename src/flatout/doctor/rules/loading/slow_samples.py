"""FO106 slow-samples

What it does
Finds the line of a dataset or collate function that the step waits for most of the time. A sample that is
decoded, tokenised or joined in Python is the usual case.

Why it costs
The device has nothing to do until the batch arrives. Workers share the work but do not reduce it: once
every core is busy, only cheaper samples help.

Evidence
The stack of the process that makes batches was sampled up to a thousand times a second. One function holds
up the step for at least 23 % of its time, which corresponds to 1.3 times the speed, and the named line
holds most of it. The ceiling is measured: steps without those lines, or else on cached batches; it never
exceeds the function's share of the wait.

Fix
Do it once, in one operation, or in a compiled library:

```diff
-counts = [document.count(word) for word in range(num_words)]
+counts = np.bincount(document, minlength=num_words)
-tokens = tokenizer(text)
+tokens = np.load("tokens.npy", mmap_mode="r")         # made once, before training
-image = Image.open(path).resize((256, 256))
+image = Image.open(path)
+image.draft("RGB", (256, 256))                        # decode a JPEG at about that size, not at its own
```

If the line calls a tokenizer, or a library that decodes images, the finding says what to do about it.
Decoding at a smaller size gives different pixels: it changes what the model trains on.

Fix safety
Exact if the same numbers come out: what a sample contains is up to you.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flatout.doctor import loading
from flatout.doctor.ceilings import loading_costs_nothing
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Loader, Place

ARMS = ("knock-out", "cached")
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("kept-samples", "loader-workers", "prefetch-factor", "worker-threads")
LEAST_SHARE = 1 - 1 / 1.3  # of the step
FEWEST_SAMPLES = 20
OF_THE_LOADER = ("FO101", "FO105")  # rules on the same wait
OF_A_BATCH = ("FO103", "FO106", "FO110")  # rules that name a line that makes batches
MOST_OF_IT = 0.8  # of the wait, in that line
TOKENIZERS = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "nltk", "spacy")
DECODERS = ("PIL", "imageio", "skimage", "cv2")


@dataclass(frozen=True, kw_only=True, slots=True)
class HotFunction:
    """A function that makes batches, and its line that most samples found."""

    place: Place
    samples: int
    line_samples: int
    all_samples: int
    library: str | None  # called by this line in most samples


def detect(evidence: Evidence) -> list[Finding]:
    if loading_costs_nothing(evidence):
        return []
    findings = []
    for loader in evidence.loaders:
        if loading.has_room(loader, evidence.host.cores):
            continue  # the line waits for storage, so try more workers first
        waiting = loading.late_share(evidence, loader) if loader.trains else None
        hot = _hot_function(loader)
        if waiting is None or hot is None:
            continue
        share = waiting * hot.samples / hot.all_samples
        if share >= LEAST_SHARE:
            most = loading.most_freed_share(evidence, loader, waiting) * hot.samples / hot.all_samples
            findings += _finding(evidence, loader, hot, share=share, most=most)
    return findings


def _hot_function(loader: Loader) -> HotFunction | None:
    all_samples = sum(line.samples for line in loader.lines)
    by_function: Counter[tuple[str, str | None]] = Counter()
    by_line: Counter[Place] = Counter()
    for line in loader.lines:
        if line.place is not None:
            by_function[line.place.file, line.place.function] += line.samples
            by_line[line.place] += line.samples
    if all_samples < FEWEST_SAMPLES or not by_function:
        return None
    function, samples = by_function.most_common(1)[0]
    place, line_samples = next(
        (place, num) for place, num in by_line.most_common() if (place.file, place.function) == function
    )
    called = Counter[str | None]()
    for line in loader.lines:
        if line.place == place:
            called[line.library] += line.samples
    library = called.most_common(1)[0][0]
    return HotFunction(
        place=place,
        samples=samples,
        line_samples=line_samples,
        all_samples=all_samples,
        library=library,
    )


def explains_samples(finding: Finding, other: Finding) -> bool:
    """Return whether `other`, from another rule, names a line of the function that `finding` names.

    If no number of workers made a loader faster, the line that makes it slow explains it.
    """
    if finding.code in OF_THE_LOADER and other.code in OF_A_BATCH:
        if finding.ceiling is not None and finding.ceiling.kind == "workers":
            return False
        most = (other.share or 0.0) >= MOST_OF_IT * (finding.share or 0.0)
        return most or (finding.code, other.code) == ("FO105", RULE.code)
    if finding.code != RULE.code or other.code in (RULE.code, *OF_THE_LOADER) or not other.place:
        return False
    if other.ceiling is None and (other.share or 0.0) < MOST_OF_IT * (finding.share or 0.0):
        return False  # it covers only a part, and nothing shows that the rest disappears with it
    place = finding.place
    return place is not None and (place.file, place.function) == (other.place.file, other.place.function)


def _whole_function(evidence: Evidence, place: Place) -> Place:
    """Return the function's first line if the whole function was removed: the share is the function's."""
    blocks = [
        found.place
        for found in evidence.counterfactuals
        if found.kind == ARMS[0] and found.place and found.place.file == place.file
    ]
    own = [block for block in blocks if block.function == place.function]
    return min(own, key=lambda block: block.line, default=place)


def _fix(library: str | None) -> str:
    """Say what makes such samples cheaper, by the library that makes them."""
    root = (library or "").partition("/")[0]
    if root in TOKENIZERS:
        return "tokenise once before training (dataset.map, tokens in a file), or a whole batch at once"
    if root in DECODERS or library == "torchvision/io":
        return "decode at the size that is needed (Image.draft), or keep the images at that size"
    return "do this once before training, in one operation instead of a loop, or in a compiled library"


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def _finding(
    evidence: Evidence, loader: Loader, hot: HotFunction, *, share: float, most: float
) -> list[Finding]:
    name = f"{hot.place.function}()" if hot.place.function else "the code around this line"
    where = _workers(loader.num_workers) if loader.num_workers else "the training process"
    at_line = f"in {hot.line_samples} of them at this line"
    figures = [
        f"on the stack in {hot.samples} of {hot.all_samples} samples while batches were made, {at_line}",
        f"batches are made by {where}; the step takes {show_seconds(evidence.step_s)}",
    ]
    if loader.cpu_s is not None and loader.fetch_s is not None and loader.collate_s is not None:
        made_s = loader.fetch_s.mean_s + loader.collate_s.mean_s
        figures.append(f"a batch takes {show_seconds(made_s)}, {show_seconds(loader.cpu_s)} of it on a core")
    return RULE.proven(
        evidence,
        hot.place,
        f"the step waits for {name}, most of the time at this line: {show_share(share)} of the step",
        figures=figures,
        share=share,
        observed_share=most,
        proved_at=_whole_function(evidence, hot.place),
        fix=_fix(hot.library),
    )
