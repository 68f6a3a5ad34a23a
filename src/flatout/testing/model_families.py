"""The contract of a model family, as a test class.

    from flatout.testing.model_families import ModelFamilyContract

    class TestStarcoder2(ModelFamilyContract):
        def make_model(self):
            return Starcoder2ForCausalLM(Starcoder2Config(vocab_size=96, hidden_size=64, ...)).eval()

pytest then holds the decoder that `read_decoder` makes of the model to the model itself: logits, tokens,
weights that are shared and not copied, and variants that equal the model with its weights changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatout.multiplex.decode import forward
from flatout.multiplex.decode.cache import Cache
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Request
from flatout.multiplex.factors import Factors
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.models.families import read_decoder
from flatout.multiplex.rows import Rows

NUM_TOKENS, NEW_TOKENS = 12, 6
TOLERANCE = 1e-4


class ModelFamilyContract:
    """Subclass it, and make a small model in float32 on the CPU; its weights are drawn here."""

    def make_model(self) -> nn.Module:
        """Make a model of the family, of at least two blocks."""
        raise NotImplementedError

    def drawn_model(self) -> Any:
        """Make the model with weights so large that its tokens depend on everything."""
        torch.manual_seed(0)
        model: Any = self.make_model().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.2))
        return model

    @torch.no_grad()
    def test_logits_are_those_of_the_model(self) -> None:
        model = self.drawn_model()
        tokens = _tokens(model, NUM_TOKENS)
        expected = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(
            _logits(read_decoder(model), tokens), expected, rtol=TOLERANCE, atol=TOLERANCE
        )

    @torch.no_grad()
    def test_tokens_are_those_of_the_model(self) -> None:
        """Run prompts of different lengths in two slots: decode steps, and slots that are refilled."""
        model = self.drawn_model()
        prompts = [_tokens(model, length, seed=length) for length in (NUM_TOKENS, 1, 5)]
        generator = Generator(model, slots=2, max_tokens=NUM_TOKENS + NEW_TOKENS, eos=(), mode="eager")
        requests = [Request(prompt=prompt) for prompt in prompts]
        found = [one.tokens for one in generator.generate(requests, max_new_tokens=NEW_TOKENS)]
        for prompt, tokens in zip(prompts, found, strict=True):
            text = list(prompt)
            for _ in range(NEW_TOKENS):
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
            assert tokens == tuple(text[len(prompt) :])

    @torch.no_grad()
    def test_weights_are_the_models_own(self) -> None:
        """Check that nothing is copied: the state dict shares its storage with the decoder."""
        model = self.drawn_model()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        decoder = read_decoder(model)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        owned = {value.untyped_storage().data_ptr() for value in after.values()}
        for name, product in decoder.projections().items():
            assert product.weight.untyped_storage().data_ptr() in owned, name
            assert sum(rows for _, rows in product.parts) == len(product.weight), name
        again = read_decoder(model).projections()
        for name, product in decoder.projections().items():
            assert again[name].weight.data_ptr() == product.weight.data_ptr(), name

    @torch.no_grad()
    def test_a_variant_is_the_model_with_its_weights_changed(self) -> None:
        model = self.drawn_model()
        decoder = read_decoder(model)
        tokens = _tokens(model, NUM_TOKENS)
        plain = _logits(decoder, tokens)
        generator = torch.Generator().manual_seed(1)
        for name, product in decoder.projections().items():
            out_width, in_width = product.weight.shape
            factors = Factors(
                torch.randn(2, 1, in_width, generator=generator),
                torch.randn(2, 1, out_width, generator=generator),
                0.1,
            )
            ours = _logits(decoder, tokens, {name: factors})
            change = factors.delta(1, sign=-1)
            product.weight.add_(change)
            theirs = model(torch.tensor([tokens])).logits[0]
            product.weight.sub_(change)
            torch.testing.assert_close(ours, theirs, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)
            assert not torch.allclose(ours, plain, rtol=1e-3, atol=1e-3), f"{name} changes nothing"


def _tokens(model: Any, count: int, *, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()
    return tuple(drawn)


def _logits(decoder: Decoder, tokens: tuple[int, ...], factors: dict[str, Factors] | None = None) -> Tensor:
    """Return the logits of one text; with factors, it runs variant 1 with sign -1."""
    rows = Rows((1,), (-1,)) if factors else Rows.plain(1)
    x = forward.run_blocks(
        decoder,
        forward.embed(decoder, torch.tensor([tokens]), torch.arange(len(tokens))[None]),
        Cache.empty(decoder, slots=1, max_tokens=len(tokens)),
        forward.fresh_places(decoder, slots=torch.tensor([0]), num_tokens=len(tokens)),
        rows.tables(),
        forward.deltas_of(decoder, factors or {}),
    )
    return forward.logits_of(decoder, x[0])
