"""Fifth unseen set, models of transformers: text, speech, documents, films, depth and forecasts."""

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

VOCABULARY = 16_000


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForTokenClassification

    return DistilBertForTokenClassification(DistilBertConfig(num_labels=9))


def _mpnet() -> nn.Module:
    from transformers import MPNetConfig, MPNetModel

    return MPNetModel(MPNetConfig(num_hidden_layers=8), add_pooling_layer=False)


def _roformer() -> nn.Module:
    from transformers import RoFormerConfig, RoFormerForMaskedLM

    shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    return RoFormerForMaskedLM(RoFormerConfig(**shape, intermediate_size=2048, vocab_size=VOCABULARY))


def _deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shape = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1536}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 128}
    sides = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**shape, **heads, **sides, **experts, **groups, vocab_size=VOCABULARY)
    return DeepseekV3ForCausalLM(config)


def _granite() -> nn.Module:
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = {"hidden_size": 1024, "num_hidden_layers": 10, "intermediate_size": 2560}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return GraniteForCausalLM(GraniteConfig(**shape, **heads, vocab_size=49152, attention_dropout=0.1))


def _stablelm() -> nn.Module:
    from transformers import StableLmConfig, StableLmForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 2048}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "use_parallel_residual": True}
    return StableLmForCausalLM(StableLmConfig(**shape, **heads, vocab_size=32000))


def _marian() -> nn.Module:
    from transformers import MarianConfig, MarianMTModel

    layers = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 512}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    wide = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "swish"}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": VOCABULARY - 1, "decoder_start_token_id": 0}
    return MarianMTModel(MarianConfig(**layers, **heads, **wide, **tokens, scale_embedding=True))


def _led() -> nn.Module:
    from transformers import LEDConfig, LEDForConditionalGeneration

    layers = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 512, "attention_window": 256}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    wide = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    return LEDForConditionalGeneration(LEDConfig(**layers, **heads, **wide, vocab_size=VOCABULARY))


def _hubert() -> nn.Module:
    from transformers import HubertConfig, HubertForCTC

    shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    kind = {"intermediate_size": 2048, "mask_time_prob": 0.0, "vocab_size": 32, "layerdrop": 0.05}
    return HubertForCTC(HubertConfig(**shape, **kind, ctc_zero_infinity=True))


def _speech_to_text() -> nn.Module:
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    layers = {"encoder_layers": 8, "decoder_layers": 4, "d_model": 384}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    wide = {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": 5000}
    return Speech2TextForConditionalGeneration(Speech2TextConfig(**layers, **heads, **wide))


def _series() -> nn.Module:
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

    past = {"prediction_length": 24, "context_length": 96, "lags_sequence": [1, 2, 3, 24]}
    shape = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 128}
    wide = {"encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "num_time_features": 4}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = TimeSeriesTransformerConfig(**past, **shape, **wide, **heads, num_parallel_samples=1)
    return TimeSeriesTransformerForPrediction(config)


def _timesformer() -> nn.Module:
    from transformers import TimesformerConfig, TimesformerForVideoClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 10, "num_attention_heads": 6}
    kind = {"intermediate_size": 1536, "num_frames": 8, "image_size": 224, "num_labels": 400}
    return TimesformerForVideoClassification(TimesformerConfig(**shape, **kind))


def _levit() -> nn.Module:
    from transformers import LevitConfig, LevitForImageClassification

    return LevitForImageClassification(LevitConfig(num_labels=1000))


def _hiera() -> nn.Module:
    from transformers import HieraConfig, HieraForImageClassification

    return HieraForImageClassification(HieraConfig(num_labels=1000, drop_path_rate=0.1))


def _depth() -> nn.Module:
    from transformers import DPTConfig, DPTForDepthEstimation

    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    neck = {"neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64}
    return DPTForDepthEstimation(DPTConfig(**shape, **neck, intermediate_size=1536, image_size=256))


def _siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    shape = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1536}
    text = {**shape, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return SiglipModel(SiglipConfig(text_config=text, vision_config={**shape, "image_size": 224}))


def _documents() -> nn.Module:
    from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

    shape = {"num_hidden_layers": 8, "max_position_embeddings": 514}  # two more than words, as published
    return LayoutLMv3ForTokenClassification(LayoutLMv3Config(**shape, num_labels=13))


def _handwriting() -> nn.Module:
    from transformers import TrOCRConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    vision = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
    encoder = ViTConfig(**vision, intermediate_size=1536, image_size=224)
    written = {"d_model": 512, "decoder_layers": 6, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048}
    decoder = TrOCRConfig(**written, cross_attention_hidden_size=384, vocab_size=VOCABULARY)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    model = VisionEncoderDecoderModel(config=config)
    model.encoder.requires_grad_(False)
    return model


def _tagged(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(0, 9, (batch_size, length)),
    }


def _pairs(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "questions": token_ids(batch_size, length // 2),
        "answers": token_ids(batch_size, length),
        "question_mask": padding_mask(batch_size, length // 2),
        "answer_mask": padding_mask(batch_size, length),
    }


def _pair_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Multiple negatives ranking: the other answers of the batch are the wrong ones."""
    found = []
    for ids, mask in (("questions", "question_mask"), ("answers", "answer_mask")):
        states = model(input_ids=batch[ids], attention_mask=batch[mask]).last_hidden_state
        weight = batch[mask][..., None].to(states.dtype)
        found.append(F.normalize((states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1e-9), dim=-1))
    scores = 20 * found[0] @ found[1].T
    return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))


def _tokens(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length, vocabulary=VOCABULARY)
    return {"input_ids": ids, "attention_mask": padding_mask(batch_size, length), "labels": ids.clone()}


def _unmasked(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length, vocabulary=VOCABULARY)
    return {"input_ids": ids, "labels": ids.clone()}


def _translations(*, batch_size: int, length: int, target: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "attention_mask": padding_mask(batch_size, length),
        "labels": token_ids(batch_size, target, vocabulary=VOCABULARY),
    }


def _waves(*, batch_size: int, samples: int) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(batch_size, samples),
        "labels": torch.randint(1, 32, (batch_size, 40)),
    }


def _spoken(*, batch_size: int, frames: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(batch_size, frames, 80),
        "attention_mask": padding_mask(batch_size, frames),
        "labels": token_ids(batch_size, 48, vocabulary=5000),
    }


def _hours(*, batch_size: int) -> dict[str, Tensor]:
    past, future = 96 + 24, 24
    return {
        "past_values": torch.rand(batch_size, past) + 1,
        "past_time_features": torch.randn(batch_size, past, 4),
        "past_observed_mask": torch.ones(batch_size, past),
        "future_values": torch.rand(batch_size, future) + 1,
        "future_time_features": torch.randn(batch_size, future, 4),
    }


def _clips(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 8, 3, image, image),
        "labels": torch.randint(0, 400, (batch_size,)),
    }


def _depths(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 3, image, image),
        "depth": torch.rand(batch_size, image, image) * 9 + 1,
    }


def _depth_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The spread of the logarithm's error, and the error of the slopes, where the depth is known."""
    found = model(batch["pixel_values"]).predicted_depth.float()
    found = F.interpolate(found[:, None], size=batch["depth"].shape[-2:], mode="bicubic")[:, 0]
    known = (batch["depth"] < 9.5).float()
    wrong = (torch.log(found.clamp(min=1e-3)) - torch.log(batch["depth"])) * known
    count = known.sum()
    spread = wrong.square().sum() / count - 0.85 * (wrong.sum() / count) ** 2
    across = (wrong[:, :, 1:] - wrong[:, :, :-1]).abs().mean()
    along = (wrong[:, 1:] - wrong[:, :-1]).abs().mean()
    return spread + 0.5 * (across + along)


def _captioned(*, batch_size: int, image: int) -> dict[str, Any]:
    return {
        "input_ids": token_ids(batch_size, 64, vocabulary=VOCABULARY),
        "pixel_values": torch.randn(batch_size, 3, image, image),
        "return_loss": True,
    }


def _pages(*, batch_size: int, length: int) -> dict[str, Tensor]:
    corners = torch.randint(0, 500, (batch_size, length, 2))
    return {
        "input_ids": token_ids(batch_size, length),
        "bbox": torch.cat([corners, corners + 20], dim=-1),
        "attention_mask": padding_mask(batch_size, length),
        "pixel_values": torch.randn(batch_size, 3, 224, 224),
        "labels": torch.randint(0, 13, (batch_size, length)),
    }


def _lines(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 3, 224, 224),
        "labels": token_ids(batch_size, length, vocabulary=VOCABULARY),
    }


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = own_loss) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


DISTILBERT = _subject("distilbert", _distilbert, _tagged)
MPNET = _subject("mpnet", _mpnet, _pairs, _pair_loss)
ROFORMER = _subject("roformer", _roformer, _tokens)
DEEPSEEK = _subject("deepseek", _deepseek, _unmasked)
GRANITE = _subject("granite", _granite, _tokens)
STABLELM = _subject("stablelm", _stablelm, _unmasked)
MARIAN = _subject("marian", _marian, _translations)
LED = _subject("led", _led, _translations)
HUBERT = _subject("hubert", _hubert, _waves)
SPEECH_TO_TEXT = _subject("speech-to-text", _speech_to_text, _spoken)
SERIES = _subject("series-transformer", _series, _hours)
TIMESFORMER = _subject("timesformer", _timesformer, _clips)
LEVIT = _subject("levit", _levit, image_batch, image_loss)
HIERA = _subject("hiera", _hiera, image_batch, image_loss)
DEPTH = _subject("depth", _depth, _depths, _depth_loss)
SIGLIP = _subject("siglip", _siglip, _captioned)
DOCUMENTS = _subject("documents", _documents, _pages)
HANDWRITING = _subject("handwriting", _handwriting, _lines)

CONFIGURATIONS: list[Configuration] = [
    DISTILBERT.at(32, sizes={"length": 256}, precision="bf16", clip_norm=1.0, optimizer="adamw-groups"),
    MPNET.at(128, sizes={"length": 128}, precision="fp16", clip_norm=1.0),
    MPNET.at(64, sizes={"length": 96}, precision="fp32", optimizer="adamw-schedule"),
    ROFORMER.at(16, sizes={"length": 512}, precision="fp32", accumulation=2, optimizer="adam"),
    DEEPSEEK.at(4, sizes={"length": 512}, precision="bf16", checkpointing=True, optimizer="adamw-fused"),
    GRANITE.at(8, sizes={"length": 512}, precision="pure-bf16", optimizer="lion"),
    STABLELM.at(8, sizes={"length": 512}, precision="fp16", clip_norm=1.0, optimizer="adamw-loop"),
    MARIAN.at(64, sizes={"length": 96, "target": 96}, precision="fp32", optimizer="adam", clip_norm=5.0),
    LED.at(4, sizes={"length": 1024, "target": 128}, precision="bf16", accumulation=2),
    HUBERT.at(8, sizes={"samples": 80000}, precision="fp32", optimizer="adamw-groups"),
    HUBERT.at(16, sizes={"samples": 64000}, precision="fp16", clip_norm=1.0),
    SPEECH_TO_TEXT.at(32, sizes={"frames": 800}, precision="bf16", clip_norm=10.0),
    SERIES.at(256, precision="fp32", clip_norm=1.0, optimizer="adamw-amsgrad"),
    TIMESFORMER.at(8, sizes={"image": 224}, precision="bf16", optimizer="sgd-nesterov"),
    LEVIT.at(128, sizes={"image": 224}, precision="fp32", optimizer="adamw-ema"),
    LEVIT.at(256, sizes={"image": 224}, precision="bf16", optimizer="adamw-fused"),
    HIERA.at(32, sizes={"image": 224}, precision="bf16", clip_norm=5.0),
    DEPTH.at(8, sizes={"image": 256}, precision="tf32"),
    DEPTH.at(16, sizes={"image": 256}, precision="bf16", optimizer="adamw-schedule"),
    SIGLIP.at(128, sizes={"image": 224}, precision="bf16", optimizer="adafactor"),
    DOCUMENTS.at(8, sizes={"length": 512}, precision="fp16", clip_norm=1.0),
    HANDWRITING.at(16, sizes={"length": 128}, precision="bf16", accumulation=2),
]
