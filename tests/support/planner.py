"""Configs as people write them, and a forecast that is a straight line: for tests of the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import PrecisionName, Recipe
from flatout.memory.predict.forecast import BatchBounds, Peak
from flatout.planner.config.job_config import ConfigPlace
from flatout.planner.config.settings import Setting, Settings, StageSettings
from flatout.planner.fit.fits import Budget
from flatout.planner.forecast.load import ForecastRequest

MIB = 2**20
GIB = 2**30

# Seed 001's job: the key given twice, the learning rate that YAML 1.1 takes for a string and the missing
# newline at the end are in the original.
CONFIG = """\
# Training of the embedder
data_loader:
  batch_size: 4          # per device
  num_workers: 4
model:
  lora:
    r: 8                 # rank
    alpha: 16
  gradient_checkpointing: false
training:
  learning_rate: 1e-3
  learning_rate: 2e-4
  trainer:
    accumulate_grad_batches: 16   # effective batch 64
    precision: "16-mixed"
    max_epochs: 10"""
STAGES = {
    "01_stage.yaml": "# wide\nn_positives: 32\nn_negatives: 24  # hard ones\n",
    "02_stage.yaml": "n_positives: 16\r\nn_negatives: 8\r\n",
}
HUGGING_FACE = """\
{
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-5,
    "bf16": true,
    "gradient_checkpointing": false,
    "optim": "adamw_torch"
}
"""
LIGHTNING = """\
seed_everything: 1
trainer:
  accumulate_grad_batches: 2
  precision: bf16-mixed
  devices: 4
  gradient_clip_val: 1.0
model:
  class_path: pkg.Model
  init_args: {lr: 1.0e-3}
data:
  class_path: pkg.Data
  init_args:
    batch_size: 8
"""


def write_curriculum(folder: Path) -> Path:
    """The config folder of seed 001 under `folder`."""
    conf = folder / "conf"
    (conf / "curriculum").mkdir(parents=True)
    (conf / "config.yaml").write_bytes(CONFIG.encode())
    for name, text in STAGES.items():
        (conf / "curriculum" / name).write_bytes(text.encode())
    return conf


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder but the backups."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".flatout" not in path.parts
    }


@dataclass(frozen=True, kw_only=True)
class ToyForecast:
    """Memory as a straight line in the batch: weights and optimizer, and activations per sample."""

    weights_bytes: int = 1 * GIB
    sample_bytes: int = 256 * MIB  # activations of one sample in fp32, without negatives
    negative_bytes: int = 32 * MIB  # activations of one negative of one sample
    context_bytes: int = 500 * MIB
    fragmentation: float = 1.05  # reserved over allocated
    can_checkpoint: bool = True
    evaluation_share: float = 0.125  # of the activations of training
    seconds: Callable[[int, bool], float] | None = None  # of (batch, checkpointing)
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=lambda: {"batch_size": 8, "n_negatives": 1})

    def _allocated(self, sizes: Mapping[str, int], recipe: Recipe) -> int:
        if recipe.checkpointing and not self.can_checkpoint:
            raise BadInput("the model has no gradient_checkpointing_enable")
        activations = self.sample_bytes + self.negative_bytes * sizes.get("n_negatives", 0)
        if recipe.precision not in ("fp32", "tf32"):
            activations //= 2
        if recipe.mode != "train":
            return self.weights_bytes + int(sizes["batch_size"] * activations * self.evaluation_share)
        if recipe.checkpointing:
            activations //= 4
        copies = 4 if recipe.accumulation > 1 else 3  # weights, two moments, and gradients that wait
        return copies * self.weights_bytes + sizes["batch_size"] * activations

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        allocated = self._allocated(sizes, recipe)
        reserved = int(allocated * self.fragmentation)
        return Peak(
            allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=reserved + self.context_bytes
        )

    def largest_within(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> BatchBounds:
        def largest(needed: Callable[[Peak], int]) -> int | None:
            batch = 0
            while (
                needed(self.peak_bytes({**sizes, "batch_size": batch + 1}, recipe=recipe)) <= capacity_bytes
            ):
                batch += 1
            return batch or None

        return BatchBounds(
            safe=largest(lambda peak: peak.process_bytes),
            tight=largest(lambda peak: peak.allocated_bytes + self.context_bytes),
        )

    def trains(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> bool:
        """Without the gaps, which an allocator gives back when memory ends."""
        return self._allocated(sizes, recipe) + self.context_bytes <= capacity_bytes

    def of_stage(self, name: str) -> ToyForecast:
        return self

    def step_s(self, sizes: Mapping[str, int], *, recipe: Recipe) -> float | None:
        return None if self.seconds is None else self.seconds(sizes["batch_size"], recipe.checkpointing)


def toy_maker(**options: object) -> Callable[[ForecastRequest], ToyForecast]:
    """In the place of the memory room."""
    return lambda request: ToyForecast(**options)  # type: ignore[arg-type]


def budget(usable_bytes: int, *, margin: float = 1.0, name: str = "24GB") -> Budget:
    free = Decision(value=round(usable_bytes / margin), reason="a test", source="assumed")
    return Budget(device=simulated_device(name), total_bytes=24 * 10**9, free_bytes=free, margin=margin)


def setting(value: int, key: str, *, file: str = "config.yaml") -> Setting[int]:
    return Setting(value=value, source=key, place=ConfigPlace(path=Path(file), key=key, line=1))


def stage(
    batch_size: int = 4,
    accumulation: int = 16,
    *,
    name: str = "training",
    precision: PrecisionName = "fp32",
    checkpointing: bool = False,
    eval_batch_size: int | None = None,
    batch_file: str = "config.yaml",
    sizes: Mapping[str, int] | None = None,
) -> StageSettings:
    """One stage whose knobs all have a place."""
    return StageSettings(
        name=name,
        batch_size=setting(batch_size, "batch_size", file=batch_file),
        accumulation=setting(accumulation, "accumulation", file=batch_file),
        precision=Setting(value=precision, source="precision"),
        checkpointing=Setting(
            value=checkpointing,
            source="checkpointing",
            place=ConfigPlace(path=Path("config.yaml"), key="checkpointing", line=1),
        ),
        clip_norm=Setting(value=None, source="none"),
        eval_batch_size=None if eval_batch_size is None else setting(eval_batch_size, "eval_batch_size"),
        learning_rate=Setting(value=2e-4, source="lr"),
        sizes={size: setting(value, size, file=f"{name}.yaml") for size, value in (sizes or {}).items()},
    )


def settings(*stages: StageSettings, ranks: int = 1) -> Settings:
    return Settings(
        style=Decision(value="plain config", reason="a test", source="assumed"),
        ranks=Decision(value=ranks, reason="a test", source="assumed"),
        stages=stages or (stage(),),
    )


def without_place(found: Setting[int]) -> Setting[int]:
    return dataclasses.replace(found, place=None)
