"""Members, their noise, and what rewards do: against weights really formed, and against true gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.population.weights import summarise
from flatout.ground.errors import BadInput
from flatout.multiplex.decode.generator import generate
from flatout.multiplex.decode.sampling import Sampling
from tests.support.evolution import member_delta, small_net, tiny_llama


def formed(es: Eggroll, model: nn.Module, member: int) -> nn.Module:
    """The model that a member stands for, its weights really changed."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for name in es.targets:
            parent, _, last = name.rpartition(".")
            parts = [own.get_submodule(f"{parent}.{part}".strip(".")) for part in last.split("+")]
            widths = [part.get_parameter("weight").shape[0] for part in parts]
            for part, delta in zip(parts, member_delta(es, name, member).split(widths), strict=True):
                part.get_parameter("weight").add_(delta)
    return own


# Members


def test_even_members_add_and_odd_members_subtract_the_same_noise() -> None:
    es = Eggroll(small_net(), population=6, sigma=0.1, lr=0.1)
    assert [(index, *es.member(index)) for index in range(es.population)] == [
        (0, 0, 1), (1, 0, -1), (2, 1, 1), (3, 1, -1), (4, 2, 1), (5, 2, -1),
    ]  # fmt: skip
    assert member_delta(es, "0", 3).equal(-member_delta(es, "0", 2))
    assert not member_delta(es, "0", 2).equal(member_delta(es, "0", 4))


def test_without_pairs_every_member_has_its_own_noise() -> None:
    es = Eggroll(small_net(), population=3, sigma=0.1, lr=0.1, antithetic=False)
    assert [es.member(index) for index in range(3)] == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("noise", ["int8", "normal"])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("antithetic", [True, False])
def test_the_forward_of_each_member_is_that_of_its_own_weights(
    noise: Any, rank: int, antithetic: bool
) -> None:
    net = small_net()
    es = Eggroll(net, population=8, rank=rank, sigma=0.2, lr=0.1, noise=noise, antithetic=antithetic)
    inputs = torch.randn(5, 6)
    with es.forward(rows_per_member=5) as members:
        found = members(inputs.repeat(8, 1)).view(8, 5, 3)
    for member in range(8):
        torch.testing.assert_close(found[member], formed(es, net, member)(inputs), rtol=1e-4, atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 0.01
    torch.testing.assert_close(net(inputs), small_net()(inputs))


def test_members_run_with_another_sigma_as_if_made_with_it() -> None:
    net, inputs = small_net(), torch.randn(5, 6)
    changed = Eggroll(net, population=8, sigma=0.2, lr=0.1, others="full")
    changed.sigma = 0.05
    made = Eggroll(small_net(), population=8, sigma=0.05, lr=0.1, others="full")
    found = []
    for es in (changed, made):
        with es.forward(rows_per_member=5) as members:
            found.append(members(inputs.repeat(8, 1)))
    torch.testing.assert_close(found[0], found[1])
    rewards = torch.randn(8, 5)
    for es in (changed, made):
        es.tell(rewards)
    torch.testing.assert_close(changed.masters["0"], made.masters["0"])
    with pytest.raises(BadInput, match="not above 0"):
        changed.sigma = 0.0
    language, written = tiny_llama(), []
    for es in (
        Eggroll(language, population=4, sigma=0.9, lr=0.1),
        Eggroll(language, population=4, sigma=0.3, lr=0.1),
    ):
        es.sigma = 0.3
        written.append(
            [[one.tokens for one in row] for row in es.generate([[1, 2], [3, 4]], max_new_tokens=6)]
        )
    assert written[0] == written[1]


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}, {"weight_decay": 0.1}])
def test_another_lr_moves_as_if_made_with_it(options: dict[str, Any]) -> None:
    changed = Eggroll(small_net(), population=8, sigma=0.1, lr=0.5, **options)
    made = Eggroll(small_net(), population=8, sigma=0.1, lr=0.02, **options)
    changed.lr = 0.02
    rewards = torch.randn(8, 5)
    for es in (changed, made):
        es.tell(rewards)
    assert changed.lr == 0.02 and changed.masters["0"].equal(made.masters["0"])


def test_another_lr_of_integers_is_another_threshold() -> None:
    es = Eggroll(small_net(), population=64, sigma=0.1, lr=0.3, arithmetic="int8")
    before = es.masters.threshold  # type: ignore[union-attr]
    es.lr = 0.01
    assert es.masters.threshold > before  # type: ignore[union-attr]
    with pytest.raises(BadInput, match="cannot change in int8"):
        es.sigma = 0.2


class Mixed(nn.Module):
    """Parameters of every kind that noise does not reach, beside one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.convolution = nn.Conv1d(4, 4, 1)
        self.attention = nn.MultiheadAttention(4, 2)
        self.linear = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(2)
        self.bare = nn.Parameter(torch.zeros(3))


def test_what_gets_no_noise_is_named() -> None:
    with pytest.warns(UserWarning, match=r"do not learn: bare \(3\), embedding.weight \(20\), conv") as told:
        es = Eggroll(Mixed(), population=4, sigma=0.1, lr=0.1, others="full")
    assert set(es.perturbed) == {"linear", "linear.bias", "norm.weight", "norm.bias"}
    assert set(es.frozen) == {
        "bare", "embedding.weight", "convolution.weight", "convolution.bias", "attention.in_proj_weight",
        "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias",
    }  # fmt: skip
    assert "in_proj_weight" in str(told[0].message) and told[0].filename == __file__
    chosen = Eggroll(Mixed(), population=4, sigma=0.1, lr=0.1, targets=["linear"])  # and is told no more
    assert {"linear.bias", "norm.weight", "bare"} <= set(chosen.frozen)


def test_every_parameter_of_a_language_model_moves_or_is_named() -> None:
    es = Eggroll(tiny_llama(layers=2), population=4, sigma=0.1, lr=0.1)
    moved = sum(es.perturbed.values())
    total = sum(parameter.numel() for parameter in es.model.parameters())  # type: ignore[union-attr]
    assert moved + sum(es.frozen.values()) == total
    assert summarise(es.frozen) == [
        "model.embed_tokens.weight (512)",
        "model.layers.*.input_layernorm.weight (2 x 32)",
        "model.layers.*.post_attention_layernorm.weight (2 x 32)",
        "model.norm.weight (32)",
    ]


def test_a_text_ends_where_the_generation_config_says() -> None:
    model = tiny_llama()
    es = Eggroll(model, population=2, sigma=1e-6, lr=0.1)
    first = es.generate([[1, 2, 3]], max_new_tokens=8, plain=True)[0][0].tokens
    for ends in (first[2], [15, first[2]]):
        model.generation_config.eos_token_id = ends
        stopped = es.generate([[1, 2, 3]], max_new_tokens=8, plain=True)[0][0]
        assert stopped.finished == "eos" and stopped.tokens == first[: first.index(first[2]) + 1]


def test_vectors_can_have_full_noise() -> None:
    net = small_net()
    es = Eggroll(net, population=6, sigma=0.2, lr=1.0, others="full", targets=["3"])
    inputs = torch.randn(4, 6)
    with es.forward(rows_per_member=4) as members:
        found = members(inputs.repeat(6, 1)).view(6, 4, 3)
    for member in range(6):
        own = formed(es, net, member)
        sign = -1 if member % 2 else 1
        for name in ("0.bias", "1.weight", "1.bias", "3.bias"):
            noise = es._noise.full(name, variants=range(member // 2, member // 2 + 1), epoch=0)
            own.get_parameter(name).data.add_(sign * noise.scale * noise.values[0])
        torch.testing.assert_close(found[member], own(inputs), rtol=1e-4, atol=1e-5)
    before = copy.deepcopy(net.state_dict())
    es.tell(torch.arange(6.0))
    moved = {name for name, value in net.state_dict().items() if not value.equal(before[name])}
    assert moved == {"0.bias", "1.weight", "1.bias", "3.bias", "3.weight"}


def test_a_part_of_the_population_runs_alone() -> None:
    es = Eggroll(small_net(), population=8, sigma=0.2, lr=0.1)
    inputs = torch.randn(8, 6)
    with es.forward() as members:
        whole = members(inputs)
    with es.forward(members=range(4, 8)) as members:
        part = members(inputs[4:])
    torch.testing.assert_close(part, whole[4:])


@pytest.mark.parametrize("slots", [4, 5, 18])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_language_models_members_write_what_their_own_weights_write(slots: int, num_prompts: int) -> None:
    """Rows end at different times, and slots are refilled by other members."""
    model = tiny_llama(layers=2)
    es = Eggroll(model, population=6, rank=2, sigma=0.2, lr=0.1)
    prompts = [[1, 2, 10], [7, 10], [3, 1, 4, 10]][:num_prompts]
    ends = (0, 1, 2)
    found = es.generate(prompts, max_new_tokens=24, slots=slots, eos=ends)
    lengths = {len(each.tokens) for row in found for each in row}
    assert len(lengths) > 1
    for member in range(6):
        expected = generate(formed(es, model, member), prompts, max_new_tokens=24, eos=ends)
        assert [list(each.tokens) for each in found[member]] == expected
    assert len({row[0].tokens for row in found}) > 2
    plain = es.generate(prompts, max_new_tokens=24, slots=slots, eos=ends, plain=True)
    own = generate(tiny_llama(layers=2), prompts, max_new_tokens=24, eos=ends)
    assert [list(each.tokens) for each in plain[0]] == own


def test_a_language_models_members_also_run_its_own_forward() -> None:
    model = tiny_llama()
    es = Eggroll(model, population=4, sigma=0.2, lr=0.1)
    tokens = torch.tensor([[1, 2, 3]])
    with es.forward() as members:
        found = members(tokens.repeat(4, 1)).logits
    for member in range(4):
        expected = formed(es, model, member)(tokens).logits[0]
        torch.testing.assert_close(found[member], expected, rtol=1e-4, atol=1e-4)


def test_members_sample_with_the_same_numbers_and_other_epochs_with_others() -> None:
    es = Eggroll(tiny_llama(), population=4, sigma=1e-9, lr=0.1)
    sampling = Sampling(temperature=1.0)
    first = es.generate([[1, 10], [2, 10]], max_new_tokens=12, sampling=sampling)
    assert len({tuple(each.tokens for each in row) for row in first}) == 1
    es.epoch = 1
    assert es.generate([[1, 10], [2, 10]], max_new_tokens=12, sampling=sampling)[0] != first[0]


# Noise


def test_noise_of_parameters_sides_pairs_and_epochs_is_independent() -> None:
    """One seed for every parameter would make equal shapes move alike."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    es = Eggroll(net, population=64, sigma=1.0, lr=0.1)
    draws = []
    for epoch in range(2):
        for name in es.targets:
            factors = es._noise.factors(name, variants=range(32), epoch=epoch)
            draws += [factors.shrink.double().flatten(), factors.expand.double().flatten()]
    correlation = torch.corrcoef(torch.stack(draws))
    apart = correlation - torch.eye(len(draws), dtype=torch.float64)
    assert apart.abs().max() < 5 / len(draws[0]) ** 0.5
    one = draws[0].view(32, 64)
    assert (torch.corrcoef(one) - torch.eye(32, dtype=torch.float64)).abs().max() < 5.5 / 64**0.5


def test_noise_is_kept_for_as_many_epochs_as_asked() -> None:
    es = Eggroll(small_net(), population=4, sigma=0.1, lr=0.1, noise_reuse=2)
    seen = []
    for _ in range(4):
        seen.append(member_delta(es, "0", 0))
        es.tell(torch.arange(4.0))
    assert seen[0].equal(seen[1]) and seen[2].equal(seen[3])
    assert not seen[1].equal(seen[2])


# Rewards


@pytest.mark.parametrize("best", range(8))
def test_a_reward_pulls_towards_the_member_that_earned_it(best: int) -> None:
    """A reward that reaches another member than its own gives no error, and nothing is learned."""
    net = small_net()
    before = net[0].weight.detach().clone()
    es = Eggroll(net, population=8, sigma=0.1, lr=1.0)
    deltas = torch.stack([member_delta(es, "0", member).flatten() for member in range(8)])
    rewards = torch.zeros(8, 3)
    rewards[best] = 1.0
    es.tell(rewards)
    moved = (net[0].weight.detach() - before).flatten()
    assert int(torch.cosine_similarity(deltas, moved[None]).argmax()) == best


def test_rewards_of_another_shape_are_refused() -> None:
    es = Eggroll(small_net(), population=8, sigma=0.1, lr=1.0)
    for shape in [(3, 8), (7,), (8, 3, 1)]:
        with pytest.raises(BadInput, match=r"\[members, prompts\]"):
            es.tell(torch.zeros(shape))
    assert es.epoch == 0


def test_equal_rewards_move_nothing() -> None:
    net = small_net()
    es = Eggroll(net, population=8, sigma=0.1, lr=1.0)
    statistics = es.tell(torch.ones(8, 2))
    assert statistics.update_norm == 0
    assert net[0].weight.equal(small_net()[0].weight)


def test_the_update_is_the_mean_of_fitness_times_noise() -> None:
    net = small_net()
    es = Eggroll(net, population=4, sigma=0.1, lr=0.5, shaping="z-score")
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    fitness = (rewards - rewards.mean()) / rewards.std(correction=0)
    expected = sum(fitness[member] * member_delta(es, "0", member) / 0.1 for member in range(4))
    before = net[0].weight.detach().clone()
    es.tell(rewards)
    torch.testing.assert_close(net[0].weight.detach() - before, 0.5 / 4 * expected, rtol=1e-4, atol=1e-6)


def quadratic(population: int, *, rank: int = 1, seed: int = 0) -> float:
    """The cosine between one update and the true gradient of -|W - target|^2."""
    net = nn.Linear(12, 10, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    target = torch.randn(10, 12, generator=torch.Generator().manual_seed(3))
    es = Eggroll(nn.Sequential(net), population=population, sigma=0.01, lr=1.0, rank=rank, seed=seed)
    with es.forward(rows_per_member=12) as members:  # the rows of the identity give the weights back
        columns = members(torch.eye(12).repeat(population, 1)).view(population, 12, 10)
    rewards = -(columns.mT - target).square().sum((1, 2))
    es.tell(rewards)
    return float(torch.cosine_similarity(net.weight.detach().flatten(), target.flatten(), dim=0))


def test_the_update_turns_to_the_true_gradient_as_the_population_grows() -> None:
    sizes = (8, 64, 512, 4096)
    cosines = [sum(quadratic(size, seed=seed) for seed in range(4)) / 4 for size in sizes]
    assert cosines == sorted(cosines)
    assert cosines[0] > 0.05
    assert cosines[-1] > 0.95


def test_a_higher_rank_estimates_the_same_gradient() -> None:
    assert quadratic(2048, rank=4) > 0.9


def test_the_cosine_with_the_update_before_is_that_of_the_updates() -> None:
    net = small_net()
    es = Eggroll(net, population=16, sigma=0.1, lr=1.0)
    moves, found = [], []
    for epoch in range(3):
        before = torch.cat([net[0].weight.flatten(), net[3].weight.flatten()]).detach().clone()
        found.append(es.tell(torch.arange(16.0).roll(epoch), cosine=epoch != 1).cosine)
        after = torch.cat([net[0].weight.flatten(), net[3].weight.flatten()]).detach()
        moves.append(after - before)
    assert found[:2] == [None, None]
    assert found[2] == pytest.approx(float(torch.cosine_similarity(moves[2], moves[1], dim=0)), abs=1e-5)


# Runs


def train(es: Eggroll, epochs: int, *, num: int = 8) -> None:
    inputs = torch.linspace(-1, 1, 6 * num).view(num, 6)
    for _ in range(epochs):
        with es.forward(rows_per_member=num) as members:
            output = members(inputs.repeat(es.population, 1))
        es.tell(-output.square().sum(-1).view(es.population, num))


def weights(net: nn.Module) -> Tensor:
    return torch.cat([value.flatten() for value in net.state_dict().values()])


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    nets = [small_net() for _ in range(3)]
    for net, seed in zip(nets, (1, 1, 2), strict=True):
        train(Eggroll(net, population=8, sigma=0.1, lr=0.2, seed=seed), 3)
    assert weights(nets[0]).equal(weights(nets[1]))
    assert not weights(nets[0]).equal(weights(nets[2]))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(optimizer: Any) -> None:
    def made(net: nn.Module) -> Eggroll:
        return Eggroll(
            net, population=8, sigma=0.1, lr=0.05, optimizer=optimizer, others="full", noise_reuse=2, seed=4
        )

    whole, begun, resumed = small_net(), small_net(), small_net(seed=9)
    train(made(whole), 5)
    first = made(begun)
    train(first, 3)
    for name, vector in begun.state_dict().items():
        resumed.state_dict()[name].copy_(vector)
    second = made(resumed)
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()}, epoch=first.epoch)
    train(second, 2)
    assert weights(resumed).equal(weights(whole))
    assert second.tell(torch.arange(8.0)).cosine is not None


def test_resident_noise_gives_the_update_that_redrawn_noise_gives() -> None:
    nets = [small_net(), small_net()]
    rewards = torch.arange(8.0)
    kept, redrawn = (Eggroll(net, population=8, sigma=0.1, lr=0.2) for net in nets)
    with kept.forward() as members:
        members(torch.zeros(8, 6))
    kept.tell(rewards)
    redrawn.tell(rewards)
    assert weights(nets[0]).equal(weights(nets[1]))


@pytest.mark.parametrize("noise", ["int8", "normal"])
@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}, {"arithmetic": "int8"}])
def test_the_update_has_the_same_bits_whichever_members_ran_here(noise: Any, options: dict[str, Any]) -> None:
    """All of them, or the part of one of two or four processes."""
    found = []
    for part in (range(8), range(4, 8), range(2, 4)):
        net = small_net()
        es = Eggroll(net, population=8, rank=2, sigma=0.1, lr=0.2, noise=noise, **options)
        for epoch in range(2):
            with es.forward(members=part) as members:
                members(torch.zeros(len(part), 6))
            es.tell(torch.arange(8.0).roll(epoch))
        found.append(weights(net))
    assert found[0].equal(found[1]) and found[0].equal(found[2])
    assert not found[0].equal(weights(small_net()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"population": 7}, "odd"),
        ({"population": 1, "antithetic": False}, "below 2"),
        ({"rank": 0}, "rank=0"),
        ({"sigma": 0.0}, "sigma"),
        ({"noise_reuse": 0}, "noise_reuse"),
        ({"targets": ["nothing*"]}, "no target matches 'nothing*'"),
        ({"arithmetic": "int8", "lr": 0.1, "others": "full"}, "antithetic pairs"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said.replace("*", r"\*")):
        Eggroll(small_net(), **{"population": 8, "sigma": 0.1, "lr": 0.1, **wrong})


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(BadInput) as error:
        Eggroll(small_net(), population=5, sigma=-1, lr=0.1, rank=0)
    assert "odd" in error.value.message and "sigma" in error.value.message and "rank" in error.value.message


def test_a_module_does_not_generate_and_a_language_models_vectors_stay() -> None:
    with pytest.raises(BadInput, match="not a causal language model"):
        Eggroll(small_net(), population=4, sigma=0.1, lr=0.1).generate([[1]], max_new_tokens=1)
    with pytest.raises(BadInput, match="others"):
        Eggroll(tiny_llama(), population=4, sigma=0.1, lr=0.1, others="full")
    es = Eggroll(small_net(), population=4, sigma=0.1, lr=0.1)
    with pytest.raises(BadInput, match="members"), es.forward(members=range(2, 9)):
        pass


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_moves_the_weights_as_the_operators_do(dtype: torch.dtype, rank: int) -> None:
    """The noise is the CPU's, so the master weights are too, but for the product's own rounding."""
    rewards = torch.arange(16.0).roll(5)
    moved = {}
    for device in ("cpu", "cuda"):
        net = small_net().to(device, dtype)
        es = Eggroll(net, population=16, rank=rank, sigma=0.1, lr=1.0)
        start = {name: es.masters[name].cpu().clone() for name in es.targets}
        assert device == "cpu" or all(es.masters._addresses_of(names) is not None for names in es._stacks)  # type: ignore[union-attr]
        found = es.tell(rewards, cosine=False)
        moved[device] = {name: es.masters[name].cpu() - start[name] for name in es.targets}, found
        weights = dict(zip(es.targets, es._targets.values(), strict=True))
        assert all(weights[name].equal(es.masters[name].to(dtype)) for name in es.targets)
    for name, wanted in moved["cpu"][0].items():
        error = (moved["cuda"][0][name] - wanted).norm() / wanted.norm()
        assert error < 2e-3
    for figure in ("direction_norm", "update_norm", "update_share"):
        assert getattr(moved["cuda"][1], figure) == pytest.approx(getattr(moved["cpu"][1], figure), rel=2e-3)


@pytest.mark.gpu
def test_noise_that_is_not_in_memory_gives_the_same_bits_on_a_gpu() -> None:
    kept, redrawn = small_net().cuda(), small_net().cuda()
    first, second = (Eggroll(net, population=8, sigma=0.1, lr=0.2) for net in (kept, redrawn))
    with first.forward() as members:
        members(torch.zeros(8, 6, device="cuda"))
    for es in (first, second):
        es.tell(torch.arange(8.0), cosine=False)
    assert weights(kept).equal(weights(redrawn))
    assert not weights(kept).equal(weights(small_net().cuda()))
