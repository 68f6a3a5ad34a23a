from __future__ import annotations

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.loading.rows_one_by_one_from_memory import detect


def job(made, *arms, wait_share=0.8):
    loader = made.loader(dataset="TensorDataset", fetch_s=made.spread(0.01), collate_s=made.spread(0.005))
    return made.evidence(
        steps=made.steps(wait_share=wait_share),
        loaders=(loader,),
        counterfactuals=(made.counterfactual("cached", 4.0), *arms),
    )


def test_rows_that_come_at_once_explain_the_wait_for_the_loader(made):
    arms = (made.counterfactual("workers", 1.5, value=2.0), made.counterfactual("whole-batches", 3.8))
    (finding,) = examine(job(made, *arms))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO108", made.place(10), 3.8)
    assert "TensorDataset is asked for 32 rows" in finding.message


def test_batches_that_cost_nothing_are_no_other_remedy(made):
    (finding,) = examine(job(made, made.counterfactual("whole-batches", 2.0)))
    assert (finding.code, finding.ceiling.speedup) == ("FO108", 2.0)


def test_no_more_is_promised_than_the_step_waits(made):
    (finding,) = detect(job(made, made.counterfactual("whole-batches", 3.8), wait_share=0.5))
    assert finding.ceiling.speedup == pytest.approx(2.0)


def test_look_alikes(made):
    assert detect(job(made)) == []
    assert detect(job(made, made.counterfactual("whole-batches", 1.0))) == []
    faster = made.counterfactual("workers", 3.0, value=2.0)
    assert detect(job(made, faster, made.counterfactual("whole-batches", 2.0))) == []
