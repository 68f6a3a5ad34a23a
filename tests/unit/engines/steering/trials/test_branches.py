from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from flatout.engines.steering.trials import branches as module
from flatout.engines.steering.trials.branches import BranchScorer
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import MODES, Steering
from flatout.engines.steering.trials.trial_engine import TokenBranch
from flatout.ground.errors import BadInput
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import FAMILIES, VOCABULARY, prompts_of, shared_model

WIDTH = 48


def some_branches(*, number: int = 20, seed: int = 0) -> list[TokenBranch]:
    """Branches of four trunks (one of them empty), different lengths, trials and first steered tokens."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    trunks = [(), *prompts_of([4, 9, 21])]
    trials = [
        Steering(layer=layer, direction=torch.randn(WIDTH, generator=generator), amount=amount)
        for layer, amount in ((0, 1.0), (1, 2.0), (1, -1.0))
    ]
    for mode in MODES[1:]:
        both = torch.randn(2, WIDTH, generator=generator)
        second = Steering(layer=1, direction=both[1], amount=0.7, mode=mode)
        trials.append(Steering(layer=0, direction=both[0], amount=0.5, mode=mode, others=(second,)))
    trials.append(replace(trials[0], others=(trials[1],)))
    made = []
    for index in range(number):
        tokens = prompts_of([drawn.randrange(1, 6)], seed=100 + index)[0]
        targets = tuple((drawn.randrange(len(tokens)), drawn.randrange(VOCABULARY)) for _ in range(3))
        made.append(
            TokenBranch(
                trunk=trunks[index % 4],
                tokens=tokens,
                targets=targets,
                steering=drawn.choice([None, *trials]),
                first_steered=drawn.randrange(len(tokens) + 1),
            )
        )
    return made


@torch.no_grad()
def expected(family: str, branch: TokenBranch) -> list[float]:
    """The branch alone, as one text through Hugging Face's model."""
    model = shared_model(family)
    text = torch.tensor([branch.trunk + branch.tokens])
    prompt = len(branch.trunk) + branch.first_steered + 1  # its last token is the first that is steered
    with steered_model(model, [branch.steering], prompt_lengths=[prompt]):
        scores = model(input_ids=text).logits[0].log_softmax(-1)
    return [float(scores[len(branch.trunk) + index, token]) for index, token in branch.targets]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_branch_is_its_text_alone(family: str) -> None:
    made = [one for one in some_branches() if one.first_steered < len(one.tokens)]
    found = dict(BranchScorer(read_decoder(shared_model(family))).log_probabilities(made))
    assert sorted(found) == list(range(len(made)))
    for number, one in enumerate(made):
        assert found[number] == pytest.approx(expected(family, one), abs=2e-5)


def test_batches_padding_and_neighbours_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, made = read_decoder(shared_model()), some_branches(number=30)
    whole = dict(BranchScorer(decoder).log_probabilities(made))
    assert all(math.isfinite(value) for values in whole.values() for value in values)
    alone = {
        number: next(iter(BranchScorer(decoder).log_probabilities([one])))[1]
        for number, one in enumerate(made)
    }
    small = dict(BranchScorer(decoder, batch_tokens=7, trunk_tokens=10).log_probabilities(made))
    monkeypatch.setattr(module, "ROW_TOKENS", 3)
    monkeypatch.setattr(module, "TARGETS", 2)
    narrow = dict(BranchScorer(decoder).log_probabilities(made))
    backwards = dict(BranchScorer(decoder).log_probabilities(made[::-1]))
    for number, values in whole.items():
        for other in (alone[number], small[number], narrow[number], backwards[len(made) - 1 - number]):
            assert other == pytest.approx(values, abs=2e-5)


def test_a_trunk_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = BranchScorer(read_decoder(shared_model()))
    grown: list[int] = []
    compute = scorer._compute_trunks
    monkeypatch.setattr(
        scorer, "_compute_trunks", lambda trunks: (grown.append(len(trunks)), compute(trunks))[1]
    )
    first = dict(scorer.log_probabilities(some_branches()))
    again = dict(scorer.log_probabilities(some_branches()))
    assert sum(grown) == 3 and first == again
    scorer.weights_changed()
    dict(scorer.log_probabilities(some_branches()))
    assert sum(grown) == 6


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, made = BranchScorer(read_decoder(shared_model())), some_branches()
    whole = dict(scorer.log_probabilities(made))
    run = scorer._run

    def tight(branches: list[TokenBranch], batch: list[object]) -> object:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("too many rows")
        return run(branches, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(scorer, "_run", tight)
    found = dict(scorer.log_probabilities(made))
    assert scorer.batch_tokens < 8192
    assert {number: pytest.approx(values, abs=2e-5) for number, values in whole.items()} == found
    monkeypatch.setattr(scorer, "_run", lambda branches, batch: tight(branches, [1, 2, 3]))
    with pytest.raises(torch.OutOfMemoryError):
        list(scorer.log_probabilities(made))


def test_what_cannot_be_scored_is_named() -> None:
    scorer = BranchScorer(read_decoder(shared_model()))
    good = TokenBranch(trunk=(3,), tokens=(4,), targets=((0, 5),))

    def score(**changes: object) -> None:
        values = {"trunk": good.trunk, "tokens": good.tokens, "targets": good.targets, **changes}
        list(scorer.log_probabilities([good, TokenBranch(**values)]))  # type: ignore[arg-type]

    with pytest.raises(BadInput, match=r"branch 1 has 1 \+ 0 tokens"):
        score(tokens=(), targets=())
    with pytest.raises(BadInput, match="the model has 256 positions"):
        score(trunk=(3,) * 256)
    with pytest.raises(BadInput, match="outside the vocabulary of 97"):
        score(targets=((0, 97),))
    along = torch.ones(WIDTH)
    with pytest.raises(BadInput, match="layers 0 to 1"):
        score(steering=Steering(layer=2, direction=along, amount=1.0))
    with pytest.raises(BadInput, match="48 wide"):
        score(steering=Steering(layer=1, direction=along[:5], amount=1.0))
    with pytest.raises(BadInput, match="batch_tokens=0"):
        BranchScorer(read_decoder(shared_model()), batch_tokens=0)
