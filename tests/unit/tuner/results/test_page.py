from __future__ import annotations

from dataclasses import replace

from flatout.tuner.results.outcome import Tried, Tuning
from flatout.tuner.results.page import _gains, page
from flatout.tuner.results.prescription import Prescription
from flatout.tuner.verdict import Gain, JobGain
from tests.unit.tuner.results.test_prescription import KEPT, MACHINE, PROOF

NOISE = Gain(ratio=1.0, low=0.99, high=1.01, num_pairs=3, best=1.01)
TOTAL = Gain(ratio=1.5, low=1.4, high=1.6, num_pairs=3, best=1.55)


def tried(name: str, answer: str, gain: Gain | None, *, value: object = True, reason: str = "") -> Tried:
    return Tried(
        name=name, value=value, safety="exact", summary=f"what {name} does", answer=answer, reason=reason,
        gain=gain,
    )  # type: ignore[arg-type]  # fmt: skip


DONE = Tuning(
    tried=(
        tried("loader-workers", "kept", TOTAL, value=4, reason="losses and gradients are equal bit for bit"),
        tried(
            "loader-workers", "no gain", replace(TOTAL, ratio=1.2, low=1.1), value=2, reason="4 gains more"
        ),
        tried("garbage-every", "no gain", NOISE, value=100, reason="it gains less than 3 %"),
        tried("compile", "failed", None, value="default", reason="the script raised <b>no</b> compiler"),
        tried("threads", "wrong numbers", None, value=1, reason="loss 3 is 0.7 instead of 0.8"),
    ),
    noise=NOISE,
    reproducible=True,
    total=TOTAL,
    prescription=Prescription(
        command=("train.py", "--epochs", "3"), treatments=KEPT[:1], proof=PROOF, machine=MACHINE
    ),
    num_trials=31,
    step_s=0.02,
    diff="--- a\n+++ b\n-    for row in <x>:\n+    rows = x",
    smallest_gain=1.04,
    envelope=1.9e-7,
    job=JobGain(extra_s=12.0, pays_after=1700),
)


def test_the_page_tells_before_after_trials_reasons_and_the_machine() -> None:
    shown = page(DONE)
    for words in (
        "1.50× faster with loader-workers 4",
        "20.0 ms", "13.3 ms", "1.50× [1.40, 1.60]",  # before, after, its interval
        "it gains less than 3 %", "&lt;b&gt;no&lt;/b&gt; compiler", "loss 3 is 0.7 instead of 0.8",
        "repeats bit for bit", "one launch", "1.50 µs", "for row in &lt;x&gt;",
        "smallest gain that such pairs can show here is 1.04×", "earned back in 1700 steps",
        "weights that differ in their last bit move its losses by up to 1.9e-07 of the loss",
    ):  # fmt: skip
        assert words in shown, words
    assert shown.count('class="row"') == 3 + 4  # two bars and their axis; three measured trials and theirs


def test_gains_of_all_sizes_lie_apart_on_the_axis() -> None:
    def gain(ratio: float) -> Gain:
        return Gain(ratio=ratio, low=0.9 * ratio, high=1.1 * ratio, num_pairs=3, best=ratio)

    for largest in (2.0, 8.0, 60.0, 700.0):
        chart = _gains([tried("a", "kept", gain(each)) for each in (1.0, 1.5, largest / 1.3, largest)])
        places = [mark.at[0][0] for row in chart.rows for mark in row.marks if mark.shape == "dot"]
        assert places == sorted(set(places)) and len(places) == 4 and places[-1] < 1.0, largest
        assert len(chart.across.ticks) > 1 and chart.across.ticks[-1][0] <= chart.across.high


def test_a_tuning_that_kept_nothing_says_so() -> None:
    nothing = replace(
        DONE,
        tried=(),
        total=None,
        reproducible=False,
        prescription=Prescription(command=("t.py",), treatments=()),
    )
    shown = page(nothing)
    assert "No treatment that was tried gains" in shown and "no treatment matches" in shown
    assert "does not repeat bit for bit" in shown and "Before and after" not in shown
