"""Second unseen set, text: decoders, encoders and pairs of models that no rule was made from.

Estimated, and the estimates committed, before the first of them was measured (`results/unseen-second-...`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import (
    Configuration,
    Subject,
    own_loss,
    padding_mask,
    token_ids,
)


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072}
    return OPTForCausalLM(OPTConfig(**shape))


def _falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    shape = {"hidden_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 16}
    return FalconForCausalLM(FalconConfig(**shape, vocab_size=50000, multi_query=True))


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 3584}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return MistralForCausalLM(MistralConfig(**shape, **heads, vocab_size=32000, sliding_window=256))


def _phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 3072}
    return PhiForCausalLM(PhiConfig(**shape, num_attention_heads=12, vocab_size=40000))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1792}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return MixtralForCausalLM(MixtralConfig(**shape, **heads, vocab_size=32000, num_local_experts=8))


def _modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    shape = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 1152}
    return ModernBertForMaskedLM(ModernBertConfig(**shape, num_attention_heads=12))


def _albert() -> nn.Module:
    """One layer of weights, used twelve times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    shape = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}
    return AlbertForMaskedLM(AlbertConfig(**shape, num_attention_heads=12))


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    shape = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    wide = {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    return BartForConditionalGeneration(BartConfig(**shape, **heads, **wide))


def _longformer() -> nn.Module:
    from transformers import LongformerConfig, LongformerForMaskedLM

    shape = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    places = {"max_position_embeddings": 4098, "attention_window": 256}
    return LongformerForMaskedLM(LongformerConfig(**shape, **places, vocab_size=30522))


def _perceiver() -> nn.Module:
    from transformers import PerceiverConfig, PerceiverForSequenceClassification

    shape = {"num_latents": 256, "d_latents": 768, "d_model": 512, "num_self_attends_per_block": 8}
    heads = {"num_self_attention_heads": 8, "num_cross_attention_heads": 8}
    return PerceiverForSequenceClassification(
        PerceiverConfig(**shape, **heads, vocab_size=262, max_position_embeddings=2048, num_labels=4)
    )


def _decoder_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length)
    return {"input_ids": ids, "labels": ids}


def _masked_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length)
    return {"input_ids": ids, "attention_mask": padding_mask(batch_size, length), "labels": ids}


def _summary_batch(*, batch_size: int, length: int, target: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": token_ids(batch_size, target),
    }


def _bytes_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "inputs": token_ids(batch_size, length, vocabulary=262),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(0, 4, (batch_size,)),
    }


class Preference(nn.Module):
    """Two copies of a decoder, one of them frozen: which of two answers is preferred."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = _phi(), _phi()
        self.reference.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """By how much the policy finds each text likelier than the reference does."""
        with torch.no_grad():
            before = log_likelihood(self.reference(input_ids=ids).logits, ids)
        return log_likelihood(self.policy(input_ids=ids).logits, ids) - before


def log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    scores = logits[:, :-1].float().log_softmax(dim=-1)
    return scores.gather(2, ids[:, 1:, None]).squeeze(2).sum(dim=1)


def _preference_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"preferred": token_ids(batch_size, length), "refused": token_ids(batch_size, length)}


def _preference_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    margins = model(torch.cat([batch["preferred"], batch["refused"]]))
    preferred, refused = margins.chunk(2)
    return -F.logsigmoid(0.1 * (preferred - refused)).mean()


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = own_loss) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


OPT = _subject("opt", _opt, _decoder_batch)
FALCON = _subject("falcon", _falcon, _decoder_batch)
MISTRAL = _subject("mistral", _mistral, _decoder_batch)
PHI = _subject("phi", _phi, _decoder_batch)
MIXTRAL = _subject("mixtral", _mixtral, _decoder_batch)
MODERNBERT = _subject("modernbert", _modernbert, _masked_batch)
ALBERT = _subject("albert", _albert, _masked_batch)
BART = _subject("bart", _bart, _summary_batch)
LONGFORMER = _subject("longformer", _longformer, _masked_batch)
PERCEIVER = _subject("perceiver", _perceiver, _bytes_batch)
PREFERENCE = _subject("preference", Preference, _preference_batch, _preference_loss)

CONFIGURATIONS: list[Configuration] = [
    OPT.at(8, sizes={"length": 512}, precision="fp16", clip_norm=1.0),
    FALCON.at(8, sizes={"length": 1024}, precision="fp16", checkpointing=True, optimizer="adamw-fused"),
    MISTRAL.at(8, sizes={"length": 1024}, precision="pure-bf16"),
    PHI.at(8, sizes={"length": 512}, precision="bf16", accumulation=2, optimizer="adafactor"),
    MIXTRAL.at(8, sizes={"length": 512}, precision="bf16", clip_norm=1.0),
    MODERNBERT.at(16, sizes={"length": 512}, precision="bf16"),
    ALBERT.at(32, sizes={"length": 256}, precision="tf32", clip_norm=1.0),
    BART.at(16, sizes={"length": 512, "target": 128}, precision="fp16"),
    LONGFORMER.at(4, sizes={"length": 2048}, precision="bf16", checkpointing=True),
    PERCEIVER.at(16, sizes={"length": 2048}, precision="fp32"),
    PREFERENCE.at(4, sizes={"length": 512}, precision="bf16", clip_norm=1.0),
]
