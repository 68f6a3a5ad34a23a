"""Sixth unseen set, models of transformers: questions, code, dialogue, images, sound and series."""

from __future__ import annotations

from typing import Any

import torch
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

VOCABULARY = 24_000


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForQuestionAnswering

    return RobertaForQuestionAnswering(RobertaConfig(max_position_embeddings=514, vocab_size=50265))


def _codegen() -> nn.Module:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    shape = {"n_embd": 768, "n_layer": 8, "n_head": 12, "rotary_dim": 32, "n_positions": 1024}
    return CodeGenForCausalLM(CodeGenConfig(**shape, vocab_size=VOCABULARY))


def _mpt() -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(MptConfig(d_model=768, n_heads=12, n_layers=8, vocab_size=VOCABULARY))


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    shape = {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 10}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**shape, **heads, vocab_size=32064))


def _experts() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "output_router_logits": True}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 352}
    config = Qwen2MoeConfig(
        **shape, **heads, **experts, shared_expert_intermediate_size=1408, vocab_size=VOCABULARY
    )
    return Qwen2MoeForCausalLM(config)


def _mbart() -> nn.Module:
    from transformers import MBartConfig, MBartForConditionalGeneration

    layers = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 512}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    wide = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 32000}
    return MBartForConditionalGeneration(MBartConfig(**layers, **heads, **wide))


def _mt5() -> nn.Module:
    from transformers import MT5Config, MT5ForConditionalGeneration

    shape = {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "d_kv": 64}
    return MT5ForConditionalGeneration(MT5Config(**shape, vocab_size=64000, decoder_start_token_id=0))


def _blenderbot() -> nn.Module:
    from transformers import BlenderbotSmallConfig, BlenderbotSmallForConditionalGeneration

    layers = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 512}
    wide = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": VOCABULARY}
    return BlenderbotSmallForConditionalGeneration(BlenderbotSmallConfig(**layers, **wide))


def _convbert() -> nn.Module:
    from transformers import ConvBertConfig, ConvBertForSequenceClassification

    shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    return ConvBertForSequenceClassification(ConvBertConfig(**shape, intermediate_size=2048, num_labels=4))


def _mobilebert() -> nn.Module:
    from transformers import MobileBertConfig, MobileBertForTokenClassification

    return MobileBertForTokenClassification(MobileBertConfig(num_hidden_layers=16, num_labels=12))


def _deit() -> nn.Module:
    from transformers import DeiTConfig, DeiTForImageClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    return DeiTForImageClassification(DeiTConfig(**shape, intermediate_size=1536, num_labels=1000))


def _swinv2() -> nn.Module:
    from transformers import Swinv2Config, Swinv2ForImageClassification

    config = Swinv2Config(image_size=256, window_size=8, embed_dim=96, depths=[2, 2, 6, 2], num_labels=1000)
    return Swinv2ForImageClassification(config)


def _convnextv2() -> nn.Module:
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 6, 2]}
    return ConvNextV2ForImageClassification(ConvNextV2Config(**sizes, num_labels=1000, drop_path_rate=0.1))


def _vivit() -> nn.Module:
    from transformers import VivitConfig, VivitForVideoClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
    kind = {"intermediate_size": 1536, "num_frames": 16, "image_size": 160, "num_labels": 400}
    return VivitForVideoClassification(VivitConfig(**shape, **kind))


def _big_transfer() -> nn.Module:
    from transformers import BitConfig, BitForImageClassification

    sizes = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
    return BitForImageClassification(BitConfig(**sizes, layer_type="preactivation", num_labels=1000))


def _first_mobilenet() -> nn.Module:
    from transformers import MobileNetV1Config, MobileNetV1ForImageClassification

    return MobileNetV1ForImageClassification(MobileNetV1Config(num_labels=1000))


def _wavlm() -> nn.Module:
    from transformers import WavLMConfig, WavLMForSequenceClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
    kind = {"intermediate_size": 1536, "mask_time_prob": 0.0, "layerdrop": 0.0, "num_labels": 12}
    return WavLMForSequenceClassification(WavLMConfig(**shape, **kind))


def _blip() -> nn.Module:
    from transformers import BlipConfig, BlipForConditionalGeneration

    shape = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    text = {**shape, "vocab_size": VOCABULARY, "encoder_hidden_size": 512, "bos_token_id": 1}
    text |= {"eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
    vision = {**shape, "image_size": 224, "patch_size": 16}
    return BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision))


def _patchtst() -> nn.Module:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    series = {"num_input_channels": 7, "context_length": 512, "prediction_length": 96}
    patches = {"patch_length": 16, "patch_stride": 8, "d_model": 128, "ffn_dim": 256}
    config = PatchTSTConfig(**series, **patches, num_hidden_layers=3, num_attention_heads=16, dropout=0.2)
    return PatchTSTForPrediction(config)


def _vilt() -> nn.Module:
    from transformers import ViltConfig, ViltForQuestionAnswering

    shape = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
    kind = {"intermediate_size": 1536, "image_size": 224, "patch_size": 32, "num_labels": 300}
    return ViltForQuestionAnswering(ViltConfig(**shape, **kind, max_image_length=-1))


def _spans(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length, vocabulary=50_000) + 2,
        "attention_mask": padding_mask(batch_size, length),
        "start_positions": torch.randint(0, length - 1, (batch_size,)),
        "end_positions": torch.randint(0, length - 1, (batch_size,)),
    }


def _text(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch_size, length))
    return {"input_ids": ids, "attention_mask": padding_mask(batch_size, length), "labels": ids.clone()}


def _pairs(*, batch_size: int, length: int, target: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (batch_size, length)),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(3, VOCABULARY, (batch_size, target)),
    }


def _sentences(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(0, 4, (batch_size,)),
    }


def _words(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(0, 12, (batch_size, length)),
    }


def _films(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 16, 3, image, image),
        "labels": torch.randint(0, 400, (batch_size,)),
    }


def _sound(*, batch_size: int, samples: int) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(batch_size, samples),
        "labels": torch.randint(0, 12, (batch_size,)),
    }


def _captioned(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch_size, length))
    return {
        "pixel_values": torch.randn(batch_size, 3, 224, 224),
        "input_ids": ids,
        "attention_mask": padding_mask(batch_size, length),
        "labels": ids.clone(),
    }


def _series(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(batch_size, 512, 7),
        "future_values": torch.randn(batch_size, 96, 7),
    }


def _asked_images(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, 40),
        "attention_mask": torch.ones(batch_size, 40, dtype=torch.long),
        "pixel_values": torch.randn(batch_size, 3, 224, 224),
        "labels": torch.rand(batch_size, 300),
    }


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = own_loss) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


ROBERTA = _subject("roberta", _roberta, _spans)
CODEGEN = _subject("codegen", _codegen, _text)
MPT = _subject("mpt", _mpt, _text)
PHI3 = _subject("phi3", _phi3, _text)
EXPERTS = _subject("shared-experts", _experts, _text)
MBART = _subject("mbart", _mbart, _pairs)
MT5 = _subject("mt5", _mt5, _pairs)
BLENDERBOT = _subject("blenderbot", _blenderbot, _pairs)
CONVBERT = _subject("convbert", _convbert, _sentences)
MOBILEBERT = _subject("mobilebert", _mobilebert, _words)
DEIT = _subject("deit", _deit, image_batch, image_loss)
SWINV2 = _subject("swinv2", _swinv2, image_batch, image_loss)
CONVNEXTV2 = _subject("convnextv2", _convnextv2, image_batch, image_loss)
VIVIT = _subject("vivit", _vivit, _films)
BIG_TRANSFER = _subject("big-transfer", _big_transfer, image_batch, image_loss)
FIRST_MOBILENET = _subject("mobilenet-first", _first_mobilenet, image_batch, image_loss)
WAVLM = _subject("wavlm", _wavlm, _sound)
BLIP = _subject("blip", _blip, _captioned)
PATCHTST = _subject("patchtst", _patchtst, _series)
VILT = _subject("vilt", _vilt, _asked_images)

CONFIGURATIONS: list[Configuration] = [
    ROBERTA.at(32, sizes={"length": 384}, precision="bf16", clip_norm=1.0, optimizer="adamw-schedule"),
    CODEGEN.at(8, sizes={"length": 512}, precision="fp16", clip_norm=1.0),
    MPT.at(8, sizes={"length": 512}, precision="bf16", optimizer="adamw-groups"),
    PHI3.at(
        8,
        sizes={"length": 1024},
        precision="bf16",
        checkpointing=True,
        clip_norm=1.0,
        optimizer="adamw-fused",
    ),
    EXPERTS.at(8, sizes={"length": 256}, precision="bf16", clip_norm=1.0),
    MBART.at(16, sizes={"length": 192, "target": 64}, precision="fp32", optimizer="adam"),
    MT5.at(16, sizes={"length": 256, "target": 64}, precision="bf16", optimizer="adafactor"),
    BLENDERBOT.at(32, sizes={"length": 96, "target": 48}, precision="fp16", clip_norm=1.0),
    CONVBERT.at(32, sizes={"length": 128}, precision="fp32", optimizer="adamw-schedule"),
    MOBILEBERT.at(32, sizes={"length": 192}, precision="tf32", clip_norm=1.0),
    DEIT.at(64, sizes={"image": 224}, precision="bf16", accumulation=2, optimizer="adamw-ema"),
    SWINV2.at(32, sizes={"image": 256}, precision="fp16", clip_norm=5.0),
    CONVNEXTV2.at(64, sizes={"image": 224}, precision="fp32", optimizer="adamw-groups"),
    VIVIT.at(8, sizes={"image": 160}, precision="bf16", checkpointing=True, optimizer="sgd-momentum"),
    BIG_TRANSFER.at(32, sizes={"image": 224}, precision="fp32", optimizer="sgd-momentum"),
    FIRST_MOBILENET.at(64, sizes={"image": 224}, precision="fp32", optimizer="rmsprop"),
    WAVLM.at(16, sizes={"samples": 48000}, precision="fp32", optimizer="adamw-schedule"),
    BLIP.at(32, sizes={"length": 32}, precision="bf16", clip_norm=1.0),
    PATCHTST.at(128, precision="fp32", optimizer="adam"),
    VILT.at(64, precision="pure-bf16", optimizer="adamw"),
    ROBERTA.at(16, sizes={"length": 384}, precision="fp32", accumulation=4, optimizer="adamw-loop"),
    CONVNEXTV2.at(128, sizes={"image": 160}, precision="bf16", optimizer="adamw-ema"),
    MBART.at(32, sizes={"length": 192, "target": 64}, precision="bf16", checkpointing=True),
]
