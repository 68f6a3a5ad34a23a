from __future__ import annotations

import dataclasses

from flatout.doctor.rules.loading.list_of_arrays_to_tensor import detect
from flatout.measure.evidence import FetchLine


def in_loader(made, function="torch.tensor of arrays", *, samples=80, wait_share=0.6, cached=2.0):
    call = dataclasses.replace(made.call(function, calls_per_batch=32.0), in_collate=False)
    lines = (
        FetchLine(place=call.place, in_collate=False, samples=samples),
        FetchLine(place=None, in_collate=False, samples=100 - samples),
    )
    return made.evidence(
        steps=made.steps(wait_share=wait_share),
        loaders=(made.loader(calls=(call,), lines=lines),),
        counterfactuals=(made.counterfactual("cached", cached),),
    )


def test_a_line_of_the_dataset_is_found_with_no_more_than_it_holds(made):
    (finding,) = detect(in_loader(made))
    assert (finding.code, finding.place.line) == ("FO110", 20)
    assert finding.ceiling.speedup == 1 / (1 - 0.6 * 0.8)


def test_a_line_of_the_step_is_found(made):
    site = made.site("create", op="tensor of arrays", line=30)
    arm = made.counterfactual("knock-out", 1.6, line=30)
    (finding,) = detect(made.evidence(sites=(site,), counterfactuals=(arm,)))
    assert (finding.place.line, finding.ceiling.speedup) == (30, 1.6)


def test_look_alikes(made):
    assert detect(in_loader(made, "torch.tensor")) == []
    assert detect(in_loader(made, samples=4)) == []
    assert detect(in_loader(made, cached=1.0)) == []
    assert detect(made.evidence(sites=(made.site("create", op="tensor"),))) == []
