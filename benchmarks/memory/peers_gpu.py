"""Lightning's BatchSizeFinder on the GPU: which batch it finds under the same caps, and how long it takes.

    python benchmarks/memory/peers_gpu.py --out lightning.json [--seconds 300] [--modes power binsearch]

It runs the job at growing sizes until the GPU is out of memory.  Its time counts from the built model to the
answer, without imports.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a parent with a CUDA context could not fork

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory.children import Pool, Task  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import every_configuration  # noqa: E402
from benchmarks.memory.preparation import base_bytes, describe, import_everything, versions, write  # noqa: E402

PRECISIONS = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "pure-bf16": "bf16-true",
}
NUM_SAMPLES = 2**17


def make_module(configuration: Configuration, *, device: str) -> Any:
    """The job as a LightningModule with the attribute the finder changes."""
    import pytorch_lightning as lightning
    import torch
    from torch.utils.data import DataLoader

    job, recipe = configuration.job, configuration.recipe

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            with torch.device(device):
                self.model = job.make_model()
            if recipe.checkpointing:
                self.model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )

        def training_step(self, batch: Any, index: int) -> Any:
            return job.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return job.make_optimizer([each for each in self.parameters() if each.requires_grad])

        def train_dataloader(self) -> Any:
            def collate(samples: list[int]) -> Any:
                return job.make_batch(**configuration.sizes(batch_size=len(samples)))

            return DataLoader(range(NUM_SAMPLES), batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    return Module()


def find(configuration: Configuration, mode: str, max_trials: int, device: str) -> dict[str, Any]:
    import pytorch_lightning as lightning
    import torch
    from pytorch_lightning.tuner import Tuner

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if device == "cuda":
        assert configuration.cap_bytes is not None
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, configuration.cap_bytes / total))
    if configuration.recipe.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    recipe = configuration.recipe
    module = make_module(configuration, device=device)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = lightning.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            precision=PRECISIONS[recipe.precision],  # type: ignore[arg-type]
            gradient_clip_val=recipe.clip_norm,
            accumulate_grad_batches=recipe.accumulation,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        start = time.perf_counter()
        found = Tuner(trainer).scale_batch_size(module, mode=mode, max_trials=max_trials)
    return {"cap_bytes": configuration.cap_bytes, "found": found, "seconds": time.perf_counter() - start}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=300.0, help="start nothing after this long")
    parser.add_argument("--child-seconds", type=float, default=60.0, help="limit of one search")
    parser.add_argument("--modes", nargs="+", default=["binsearch"], choices=("power", "binsearch"))
    parser.add_argument("--max-trials", type=int, default=25)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to see that it runs")
    arguments = parser.parse_args()
    import_everything()
    import pytorch_lightning as lightning

    chosen = {
        each.label: each
        for each in every_configuration()
        if each.cap_bytes is not None and arguments.only in each.label
    }
    tasks: list[Task] = [
        (f"{mode}|{label}", find, (each, mode, arguments.max_trials, arguments.device))
        for label, each in chosen.items()
        for mode in arguments.modes
    ]
    stamp = {**versions(), "lightning": lightning.__version__}
    document: dict[str, Any] = {"versions": stamp, "base_bytes": base_bytes(), "rows": []}
    with Pool(width=1, limit_s=arguments.child_seconds) as pool:
        for key, answer in pool.run(tasks, deadline=time.monotonic() + arguments.seconds):
            mode, label = key.split("|", 1)
            document["rows"].append({**describe(chosen[label]), "finder": mode, **answer})
            write(Path(arguments.out), document)
            print(f"{label:<76} {mode:<9} {json.dumps(answer)[:200]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
