"""Steps in narrower number formats: under autocast, and with TF32 matrix products.

Autocast runs the operators that allow it in the device's 16-bit format.  It is on from the end of one step to
the backward pass, and between two backward passes of one step: backward uses the formats of the forward pass,
and leaving autocast drops the cached casts of the weights, which the optimizer is about to change.

Gradients of a 16-bit pass may vanish or overflow.  Only their time matters here, so the arm restores the
parameters and the optimizer's state at the end of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.batches import bytes_of
from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Kernels, Place
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled

LEAST_SHARE, LEAST_SHARE_OF_CPU = 0.1, 0.5  # of the step, in matrix products
FREED_OF_FP32, FREED_OF_TF32 = 0.9, 0.5  # of a matrix product's time, about
PRODUCTS = ("matmul", "convolution", "attention")
SPARE = 2  # a copy of the training state may take this fraction (1/SPARE) of the free memory


class TrainingState:
    """A copy of the parameters and the optimizer's state, to restore later."""

    def __init__(self, optimizer: Any) -> None:
        import torch

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        self._tensors = [value for value in (*parameters, *states) if isinstance(value, torch.Tensor)]
        self._kept = [tensor.detach().clone() for tensor in self._tensors] if self._fits() else None

    @property
    def is_kept(self) -> bool:
        return self._kept is not None

    def _fits(self) -> bool:
        import torch

        on_gpu = sum(bytes_of(tensor) for tensor in self._tensors if tensor.is_cuda)
        return not on_gpu or on_gpu * SPARE < torch.cuda.mem_get_info()[0]

    def put_back(self) -> None:
        import torch

        with torch.no_grad():
            for tensor, kept in zip(self._tensors, self._kept or (), strict=False):
                tensor.copy_(kept)


class Autocast(Arm):
    """The forward pass and the loss under autocast."""

    kind = label = "autocast"

    def __init__(
        self,
        clock: Clock,
        optimizer: Any,
        *,
        device: str,
        dtype: str,
        suspicion: float,
        place: Place | None = None,
    ) -> None:
        self.suspicion, self.place, self.dtype = suspicion, place, dtype
        self._clock, self._optimizer, self._device = clock, optimizer, device
        self._patches = Patches()
        self._state: TrainingState | None = None
        self._context: Any = None
        self._before: tuple[bool, Any] | None = None
        self._in_backward = False
        self._num_backwards = 0  # in this step
        self._num_expected = 1  # in a step; the block's first step tells

    def begin(self) -> None:
        import torch

        self._state = TrainingState(self._optimizer) if self._optimizer is not None else None
        if self.dtype == "float16" and (self._state is None or not self._state.is_kept):
            self._state = None
            self.refusal = "there is no room for a copy of the parameters, which 16-bit gradients may spoil"
            return
        self._before = (torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device))
        self._num_backwards, self._num_expected = 0, 1
        for name in ("backward", "grad"):
            self._patches.replace(torch.autograd, name, self._outside(getattr(torch.autograd, name)))
        functional = torch.nn.functional
        cross_entropy = self._in_full(functional.binary_cross_entropy)
        self._patches.replace(functional, "binary_cross_entropy", cross_entropy)
        self._turn_on()

    def step_end(self) -> None:
        if self._before is not None:
            self._num_expected, self._num_backwards = max(1, self._num_backwards), 0
            self._turn_off()  # a step without a backward pass
            self._turn_on()

    def end(self) -> None:
        import torch

        self._patches.undo()
        self._turn_off()
        if self._before is not None:
            torch.set_autocast_enabled(self._device, self._before[0])
            torch.set_autocast_dtype(self._device, self._before[1])
        if self._state is not None and self._state.is_kept:
            self._state.put_back()
        self._state = self._before = None

    def release(self) -> None:
        self._patches.undo()
        if ident() == self._clock.owner:  # in a process that was forked in the meantime
            self._turn_off()

    def _turn_on(self) -> None:
        import torch

        self._context = torch.autocast(self._device, dtype=getattr(torch, self.dtype))
        self._context.__enter__()

    def _turn_off(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None

    def _in_full(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function in 32 bits, as users of autocast must: it raises on a loss of probabilities."""
        import torch

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._context is None:
                return function(*args, **kwargs)
            with torch.autocast(self._device, enabled=False):
                wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
                return function(*wide, **kwargs)

        return run

    def _outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if ident() != self._clock.owner or self._in_backward:
                return function(*args, **kwargs)
            self._turn_off()
            self._in_backward = True
            self._num_backwards += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._in_backward = False
                if self._num_backwards < self._num_expected:
                    self._turn_on()

        return run


class Tf32(Arm):
    """Matrix products and convolutions of 32-bit numbers in TF32."""

    kind = label = "tf32"

    def __init__(self, *, suspicion: float, place: Place | None = None) -> None:
        self.suspicion, self.place = suspicion, place
        self._before: tuple[str, bool] | None = None

    def begin(self) -> None:
        import torch

        try:
            before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high")
            self._before = before
            torch.backends.cudnn.allow_tf32 = True
        except RuntimeError as error:  # torch rejects a mix of its old and new settings for this
            self.end()
            self.refusal = f"the script sets the precision of products in another way: {error}"

    def end(self) -> None:
        import torch

        if self._before is not None:
            torch.set_float32_matmul_precision(self._before[0])
            torch.backends.cudnn.allow_tf32 = self._before[1]
        self._before = None


def narrow_dtype(device: str) -> str | None:
    """Return the 16-bit format that the device computes in natively, or None."""
    import torch

    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        return "bfloat16" if capability >= (8, 0) else "float16" if capability >= (7, 0) else None
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, ask, lambda: False)() for ask in asks)
    return "bfloat16" if device == "cpu" and native else None


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose arms if matrix products of 32-bit numbers take much of the step."""
    import torch

    kernels, calls = context.kernels, context.module_calls
    if kernels is None or any(call.autocast is not None for call in calls) or not _is_wide(context.optimizer):
        return
    place = max(calls, key=lambda call: (call.training, call.host_s or 0.0)).place if calls else None
    wide, tf32 = (_product_share(kernels, dtype) for dtype in ("fp32", "tf32"))
    least = LEAST_SHARE if context.device == "cuda" else LEAST_SHARE_OF_CPU
    dtype = narrow_dtype(context.device)
    arms: list[Arm] = []
    if dtype is not None and wide + tf32 >= least:
        suspicion = min(1.0, FREED_OF_FP32 * wide + FREED_OF_TF32 * tf32)
        arms.append(
            Autocast(
                context.clock,
                context.optimizer,
                device=context.device,
                dtype=dtype,
                suspicion=suspicion,
                place=place,
            )
        )
    if context.device == "cuda" and wide >= least and torch.cuda.get_device_capability() >= (8, 0):
        arms.append(Tf32(suspicion=min(1.0, FREED_OF_TF32 * wide), place=place))
    for arm in arms:
        arm.refusal = COMPILED if has_compiled() else None
        yield arm


def _is_wide(optimizer: Any) -> bool:
    groups = optimizer.param_groups if optimizer is not None else ()
    dtypes = {str(parameter.dtype) for group in groups for parameter in group["params"]}
    return dtypes == {"torch.float32"}


def _product_share(kernels: Kernels, dtype: str) -> float:
    """Return a share of the step; without a GPU formats are unknown, and every product counts as 32-bit."""
    seconds = kernels.matmul_s_by_dtype.get(dtype, 0.0)
    if kernels.busy_share is None and dtype == "fp32":
        seconds = sum(kernels.by_category_s.get(category, 0.0) for category in PRODUCTS)
    return seconds / kernels.step_s if kernels.step_s else 0.0
