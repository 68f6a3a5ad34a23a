"""What an estimate says it leans on."""

from __future__ import annotations

import dataclasses

from flatout.hardware.simulated import simulated_device
from flatout.memory.predict.notes import LEANS, is_not_cuda, notes_of
from flatout.memory.trace.record import Guess, Lean
from tests.support.memory import layered_step


def test_every_lean_has_a_sentence_with_its_cudnn() -> None:
    assert set(LEANS) == set(Lean.__args__)  # type: ignore[attr-defined]
    for lean in ("convolutions", "recurrent layers", "dropout of recurrent layers"):
        assert "cuDNN 9.19 on an H200" in LEANS[lean]
    assert "too low" in LEANS["convolutions"]


def test_an_assumed_number_of_multiprocessors_is_said() -> None:
    trace = layered_step()
    assert notes_of(trace, None) == notes_of(trace, simulated_device("A100-80GB")) == ()
    (note,) = notes_of(trace, simulated_device("24GB"))
    assert "132" in note and "24GB" in note
    leaning = dataclasses.replace(trace, leans_on=("convolutions",))
    assert notes_of(leaning, None) == (LEANS["convolutions"],)


def test_every_kind_of_guess_is_said_once_with_its_places() -> None:
    evenly = [Guess(op="topk", module=name, answer="every choice equally often") for name in "abcde"]
    largest = Guess(op="nonzero", module=None, answer="every element taken as true")
    trace = dataclasses.replace(layered_step(), guesses=(*evenly, largest))
    assert notes_of(trace, None) == (
        "guessed, because it depends on data (a, b, c and 2 more): every choice equally often",
        "guessed, because it depends on data (nonzero): every element taken as true",
    )


def test_only_other_vendors_have_no_cuda() -> None:
    assert is_not_cuda(simulated_device("MI300X"))
    assert not any(is_not_cuda(device) for device in (None, simulated_device("24GB"), simulated_device("T4")))
