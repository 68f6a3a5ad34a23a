"""What the scripts of this benchmark share: imports before a fork, stamps and files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import warnings
from pathlib import Path
from typing import Any

from benchmarks.memory.configuration import Configuration


def import_everything() -> None:
    """What children need, loaded before the first fork.  No tensor work: its threads do not survive one."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    if importlib.util.find_spec("peft") is not None:  # only the adapters need it
        import peft  # noqa: F401
    import torch.optim
    import torch.utils.checkpoint  # noqa: F401
    from transformers import (  # noqa: F401
        AlbertForMaskedLM,
        ASTForAudioClassification,
        BartForConditionalGeneration,
        BeitForImageClassification,
        BertForMaskedLM,
        CohereForCausalLM,
        ConvNextForImageClassification,
        CvtForImageClassification,
        DecisionTransformerModel,
        DeepseekV3ForCausalLM,
        Dinov2ForImageClassification,
        DistilBertForTokenClassification,
        DPTForDepthEstimation,
        ElectraForPreTraining,
        EsmForMaskedLM,
        FalconForCausalLM,
        FNetForMaskedLM,
        FocalNetForImageClassification,
        FunnelForMaskedLM,
        Gemma3ForCausalLM,
        GPT2LMHeadModel,
        GPTJForCausalLM,
        GraniteForCausalLM,
        HieraForImageClassification,
        HubertForCTC,
        LayoutLMv3ForTokenClassification,
        LEDForConditionalGeneration,
        LevitForImageClassification,
        LlamaForCausalLM,
        LongformerForMaskedLM,
        MarianMTModel,
        MistralForCausalLM,
        MixtralForCausalLM,
        MobileNetV2ForImageClassification,
        MobileViTForImageClassification,
        ModernBertForMaskedLM,
        MPNetModel,
        Olmo2ForCausalLM,
        OPTForCausalLM,
        PegasusForConditionalGeneration,
        PerceiverForSequenceClassification,
        PhiForCausalLM,
        PoolFormerForImageClassification,
        PvtV2ForImageClassification,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        RegNetForImageClassification,
        RoFormerForMaskedLM,
        SiglipModel,
        Speech2TextForConditionalGeneration,
        SqueezeBertForSequenceClassification,
        StableLmForCausalLM,
        Starcoder2ForCausalLM,
        SwitchTransformersForConditionalGeneration,
        T5ForConditionalGeneration,
        TimeSeriesTransformerForPrediction,
        TimesformerForVideoClassification,
        TrOCRForCausalLM,
        VideoMAEForVideoClassification,
        VisionEncoderDecoderModel,
        ViTForImageClassification,
        ViTMAEForPreTraining,
        XLNetLMHeadModel,
    )


def base_bytes() -> int | None:
    """What processes use before any of ours has a context, without the driver's own reserve.

    CUDA's total leaves that reserve out as well; with it in one figure and not in the other, a context comes
    out 645 MB too small on an H200.  Not known where NVML's bindings are not installed.
    """
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return used


def versions() -> dict[str, str | None]:
    import torch
    import transformers

    has_peft = importlib.util.find_spec("peft") is not None
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "transformers": transformers.__version__,
        "peft": importlib.metadata.version("peft") if has_peft else None,
        "python": platform.python_version(),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def describe(configuration: Configuration) -> dict[str, Any]:
    return {
        "label": configuration.label,
        "family": configuration.family,
        "held_out": configuration.held_out,
        "sizes": dict(configuration.job.sizes),
        "optimizer": configuration.optimizer,
        "precision": configuration.recipe.precision,
        "mode": configuration.recipe.mode,
    }
