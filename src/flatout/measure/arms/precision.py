"""Steps in narrower number formats: under autocast, and with TF32 products.

Autocast runs the operators that allow it in the device's 16-bit format.  It is on from the end of one step to
the backward pass, and between two backward passes of one step: backward takes the formats of the forward
pass, and leaving autocast drops the cast weights that it keeps, which the optimizer is about to change.

Gradients of a 16-bit pass may vanish or overflow.  Only their time counts here, so the parameters and the
optimizer's state are put back at the end of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Place
from flatout.measure.patches import Patches

SPARE = 2  # a copy of the training state may take one part in this of the free memory


class TrainingState:
    """The parameters and the optimizer's state as they are, to be put back."""

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

        on_gpu = sum(int(tensor.nbytes) for tensor in self._tensors if tensor.is_cuda)
        return not on_gpu or on_gpu * SPARE < torch.cuda.mem_get_info()[0]

    def put_back(self) -> None:
        import torch

        with torch.no_grad():
            for tensor, kept in zip(self._tensors, self._kept or (), strict=False):
                tensor.copy_(kept)


class Autocast:
    """The forward pass and the loss under autocast."""

    kind = label = "autocast"
    baseline = "real"
    last_line: int | None = None

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
        self.suspicion, self.place, self.value = suspicion, place, dtype
        self.refusal: str | None = None
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
        if self.value == "float16" and (self._state is None or not self._state.is_kept):
            self._state = None
            self.refusal = "there is no room for a copy of the parameters, which 16-bit gradients may spoil"
            return
        self._before = (torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device))
        self._num_backwards, self._num_expected = 0, 1
        for name in ("backward", "grad"):
            self._patches.replace(torch.autograd, name, self._outside(getattr(torch.autograd, name)))
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

    def _turn_on(self) -> None:
        import torch

        self._context = torch.autocast(self._device, dtype=getattr(torch, self.value))
        self._context.__enter__()

    def _turn_off(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None

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


class Tf32:
    """Matrix products and convolutions of 32-bit numbers in TF32."""

    kind = label = "tf32"
    baseline = "real"
    last_line: int | None = None

    def __init__(self, *, suspicion: float, place: Place | None = None) -> None:
        self.suspicion, self.place = suspicion, place
        self.refusal: str | None = None
        self._before: tuple[str, bool] | None = None

    def begin(self) -> None:
        import torch

        try:
            before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high")
            self._before = before
            torch.backends.cudnn.allow_tf32 = True
        except RuntimeError as error:  # torch allows its old and its new settings of this, not both at once
            self.end()
            self.refusal = f"the script sets the precision of products in another way: {error}"

    def step_end(self) -> None:
        pass

    def end(self) -> None:
        import torch

        if self._before is not None:
            torch.set_float32_matmul_precision(self._before[0])
            torch.backends.cudnn.allow_tf32 = self._before[1]
        self._before = None


def narrow_dtype(device: str) -> str | None:
    """The 16-bit format that the device computes in natively; None where it has none."""
    import torch

    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        return "bfloat16" if capability >= (8, 0) else "float16" if capability >= (7, 0) else None
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, ask, lambda: False)() for ask in asks)
    return "bfloat16" if device == "cpu" and native else None
