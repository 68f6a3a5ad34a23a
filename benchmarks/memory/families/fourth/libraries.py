"""Fourth unseen set, models of transformers: text, pictures, films, sound and decisions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import (
    Configuration,
    Subject,
    image_batch,
    image_loss,
    own_loss,
    padding_mask,
    token_ids,
)


def _electra() -> nn.Module:
    from transformers import ElectraConfig, ElectraForPreTraining

    shape = {"hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8}
    return ElectraForPreTraining(ElectraConfig(**shape, intermediate_size=2048))


def _xlnet() -> nn.Module:
    from transformers import XLNetConfig, XLNetLMHeadModel

    shape = {"d_model": 512, "n_layer": 8, "n_head": 8, "d_inner": 2048}
    return XLNetLMHeadModel(XLNetConfig(**shape, vocab_size=16000))


def _fnet() -> nn.Module:
    from transformers import FNetConfig, FNetForMaskedLM

    shape = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048}
    return FNetForMaskedLM(FNetConfig(**shape, vocab_size=16000))


def _gptj() -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    shape = {"n_embd": 768, "n_layer": 8, "n_head": 12, "rotary_dim": 32, "n_positions": 1024}
    return GPTJForCausalLM(GPTJConfig(**shape, vocab_size=32000))


def _starcoder() -> nn.Module:
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 3072}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    return Starcoder2ForCausalLM(Starcoder2Config(**shape, **heads, vocab_size=40000))


def _olmo() -> nn.Module:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    shape = {"hidden_size": 1024, "num_hidden_layers": 10, "intermediate_size": 2816}
    return Olmo2ForCausalLM(Olmo2Config(**shape, num_attention_heads=16, vocab_size=50304))


def _cohere() -> nn.Module:
    from transformers import CohereConfig, CohereForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2048}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return CohereForCausalLM(CohereConfig(**shape, **heads, vocab_size=64000))


def _proteins() -> nn.Module:
    from transformers import EsmConfig, EsmForMaskedLM

    shape = {"hidden_size": 480, "num_hidden_layers": 12, "num_attention_heads": 20}
    tokens = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
    places = {"position_embedding_type": "rotary", "emb_layer_norm_before": False}
    return EsmForMaskedLM(EsmConfig(**shape, **tokens, **places, intermediate_size=1920))


def _squeezebert() -> nn.Module:
    from transformers import SqueezeBertConfig, SqueezeBertForSequenceClassification

    return SqueezeBertForSequenceClassification(SqueezeBertConfig(num_hidden_layers=8, num_labels=3))


def _funnel() -> nn.Module:
    from transformers import FunnelConfig, FunnelForMaskedLM

    shape = {"block_sizes": [3, 3, 3], "d_model": 512, "n_head": 8, "d_inner": 2048}
    return FunnelForMaskedLM(FunnelConfig(**shape, vocab_size=16000))


def _switch() -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    shape = {"d_model": 512, "d_ff": 1024, "num_layers": 6, "num_heads": 8, "num_experts": 8}
    tokens = {"vocab_size": 16000, "decoder_start_token_id": 0}
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**shape, **tokens))


def _pegasus() -> nn.Module:
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    layers = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 512}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    wide = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    return PegasusForConditionalGeneration(PegasusConfig(**layers, **heads, **wide, vocab_size=32000))


def _beit() -> nn.Module:
    from transformers import BeitConfig, BeitForImageClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    kind = {"intermediate_size": 1536, "use_relative_position_bias": True, "num_labels": 1000}
    return BeitForImageClassification(BeitConfig(**shape, **kind))


def _dino() -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    return Dinov2ForImageClassification(Dinov2Config(**shape, num_labels=1000, drop_path_rate=0.1))


def _pools() -> nn.Module:
    from transformers import PoolFormerConfig, PoolFormerForImageClassification

    return PoolFormerForImageClassification(PoolFormerConfig(num_labels=1000))


def _pyramid() -> nn.Module:
    from transformers import PvtV2Config, PvtV2ForImageClassification

    return PvtV2ForImageClassification(PvtV2Config(num_labels=1000))


def _phone() -> nn.Module:
    from transformers import MobileViTConfig, MobileViTForImageClassification

    return MobileViTForImageClassification(MobileViTConfig(num_labels=1000))


def _focal() -> nn.Module:
    from transformers import FocalNetConfig, FocalNetForImageClassification

    return FocalNetForImageClassification(FocalNetConfig(num_labels=1000))


def _convolved() -> nn.Module:
    from transformers import CvtConfig, CvtForImageClassification

    return CvtForImageClassification(CvtConfig(depth=[1, 2, 6], num_labels=1000))


def _masked_films() -> nn.Module:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    kind = {"intermediate_size": 1536, "num_frames": 8, "image_size": 160, "num_labels": 174}
    return VideoMAEForVideoClassification(VideoMAEConfig(**shape, **kind))


def _spectrogram() -> nn.Module:
    from transformers import ASTConfig, ASTForAudioClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    return ASTForAudioClassification(ASTConfig(**shape, intermediate_size=1536, num_labels=50))


def _decisions() -> nn.Module:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    shape = {"hidden_size": 256, "n_layer": 6, "n_head": 4}
    return DecisionTransformerModel(DecisionTransformerConfig(**shape, state_dim=39, act_dim=28))


def _tokens(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length, vocabulary=16000)
    return {"input_ids": ids, "attention_mask": padding_mask(batch_size, length), "labels": ids.clone()}


def _unmasked(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length, vocabulary=16000)
    return {"input_ids": ids, "labels": ids.clone()}


def _replaced(*, batch_size: int, length: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 2, (batch_size, length))
    return {**_tokens(batch_size=batch_size, length=length), "labels": labels}


def _residues(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(4, 33, (batch_size, length))
    return {"input_ids": ids, "attention_mask": padding_mask(batch_size, length), "labels": ids.clone()}


def _sentences(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length)
    mask = padding_mask(batch_size, length)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (batch_size,))}


def _summaries(*, batch_size: int, length: int, target: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length, vocabulary=16000),
        "attention_mask": padding_mask(batch_size, length),
        "labels": token_ids(batch_size, target, vocabulary=16000),
    }


def _clips(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 8, 3, image, image),
        "labels": torch.randint(0, 174, (batch_size,)),
    }


def _sounds(*, batch_size: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch_size, 1024, 128), "labels": torch.randint(0, 50, (batch_size,))}


def _journeys(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "states": torch.randn(batch_size, length, 39),
        "actions": torch.randn(batch_size, length, 28),
        "rewards": torch.randn(batch_size, length, 1),
        "returns_to_go": torch.randn(batch_size, length, 1),
        "timesteps": torch.arange(length).repeat(batch_size, 1),
        "attention_mask": padding_mask(batch_size, length),
    }


def _action_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(**batch).action_preds, batch["actions"])


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = own_loss) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


ELECTRA = _subject("electra", _electra, _replaced)
XLNET = _subject("xlnet", _xlnet, _unmasked)
FNET = _subject("fnet", _fnet, _unmasked)
GPTJ = _subject("gptj", _gptj, _tokens)
STARCODER = _subject("starcoder", _starcoder, _tokens)
OLMO = _subject("olmo", _olmo, _unmasked)
COHERE = _subject("cohere", _cohere, _tokens)
PROTEINS = _subject("proteins", _proteins, _residues)
SQUEEZEBERT = _subject("squeezebert", _squeezebert, _sentences)
FUNNEL = _subject("funnel", _funnel, _tokens)
SWITCH = _subject("switch", _switch, _summaries)
PEGASUS = _subject("pegasus", _pegasus, _summaries)
BEIT = _subject("beit", _beit, image_batch, image_loss)
DINO = _subject("dino", _dino, image_batch, image_loss)
POOLS = _subject("poolformer", _pools, image_batch, image_loss)
PYRAMID = _subject("pyramid", _pyramid, image_batch, image_loss)
PHONE = _subject("mobilevit", _phone, image_batch, image_loss)
FOCAL = _subject("focalnet", _focal, image_batch, image_loss)
CONVOLVED = _subject("convolved-tokens", _convolved, image_batch, image_loss)
MASKED_FILMS = _subject("masked-films", _masked_films, _clips)
SPECTROGRAM = _subject("spectrogram", _spectrogram, _sounds)
DECISIONS = _subject("decisions", _decisions, _journeys, _action_loss)

CONFIGURATIONS: list[Configuration] = [
    ELECTRA.at(32, sizes={"length": 256}, precision="fp16", clip_norm=1.0),
    XLNET.at(8, sizes={"length": 384}, precision="bf16"),
    FNET.at(16, sizes={"length": 512}, precision="fp32", optimizer="adam"),
    GPTJ.at(4, sizes={"length": 512}, precision="tf32", clip_norm=1.0),
    STARCODER.at(8, sizes={"length": 768}, precision="pure-bf16"),
    OLMO.at(8, sizes={"length": 1024}, precision="bf16", checkpointing=True, optimizer="adamw-fused"),
    COHERE.at(4, sizes={"length": 512}, precision="bf16", accumulation=2, clip_norm=1.0),
    PROTEINS.at(16, sizes={"length": 512}, precision="bf16"),
    SQUEEZEBERT.at(32, sizes={"length": 128}, precision="fp32"),
    FUNNEL.at(16, sizes={"length": 256}, precision="fp32", optimizer="adagrad"),
    SWITCH.at(16, sizes={"length": 256, "target": 64}, precision="bf16"),
    PEGASUS.at(16, sizes={"length": 512, "target": 64}, precision="fp32", optimizer="adafactor"),
    BEIT.at(64, sizes={"image": 224}, precision="fp16", clip_norm=3.0),
    DINO.at(64, sizes={"image": 224}, precision="bf16"),
    POOLS.at(64, sizes={"image": 224}, precision="bf16", optimizer="adamw-fused"),
    PYRAMID.at(64, sizes={"image": 224}, precision="fp32", clip_norm=1.0),
    PHONE.at(32, sizes={"image": 256}, precision="bf16"),
    FOCAL.at(32, sizes={"image": 224}, precision="tf32"),
    CONVOLVED.at(32, sizes={"image": 224}, precision="fp32", optimizer="sgd-momentum"),
    MASKED_FILMS.at(8, sizes={"image": 160}, precision="bf16", checkpointing=True),
    SPECTROGRAM.at(8, precision="fp32", optimizer="adam"),
    DECISIONS.at(64, sizes={"length": 20}, precision="fp32", clip_norm=0.25),
]
