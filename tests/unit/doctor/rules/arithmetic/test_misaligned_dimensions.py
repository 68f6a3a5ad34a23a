from __future__ import annotations

from dataclasses import replace

from flatout.doctor.rules.arithmetic.misaligned_dimensions import detect


def job(made, *gains, device="cuda"):
    place = made.module_call().place
    arms = [
        replace(made.counterfactual("padded-products", gain), place=place, value="50257 x 768")
        for gain in gains
    ]
    return made.evidence(device=device, counterfactuals=tuple(arms))


def test_fires_where_padded_layers_were_measured_to_gain(made):
    (finding,) = detect(job(made, 1.3))
    assert (finding.code, finding.place.line) == ("FO409", 40)
    assert "50257 x 768" in finding.message
    assert finding.ceiling.arm == "padded-products"


def test_look_alikes(made):
    assert detect(job(made)) == []
    assert detect(job(made, 1.3, device="cpu")) == []
    assert detect(job(made, 1.0)) == []
