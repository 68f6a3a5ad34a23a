"""Make operations on the CPU choose as CUDA would, so that a trace on the CPU shows CUDA's memory.

The differences, which this module removes for the whole process:

    autocast    CUDA casts other operations than the CPU, to other dtypes, and each parameter once until
                autocast ends; code that asks whether autocast is on (nn.TransformerEncoderLayer does, and
                then leaves its fast path) is told about CUDA's
    softmax     CUDA reads half precision and writes float in one kernel; the CPU makes a float copy first
    dropout     CUDA keeps a mask of one byte per element; the CPU multiplies by a mask of floats
    attention   see `attention`, and `encoder_layer` for whole layers in evaluation
    recurrent   see `recurrent`
    groups      grouped products accept every floating-point dtype, not only bfloat16
    optimizers  foreach implementations by default, also on tensors without data
    scaler      the check for infinities has no answer without data; steps are never skipped

Registrations cannot all be taken back: run in a child process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from flatout.ground.units import round_up
from flatout.memory.trace import known_values

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# fmt: off
LOWER = {
    "addmv", "addr", "mv", "chain_matmul", "einsum", "linalg_multi_dot", "linalg_vecdot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
}
OWN_DTYPE = {
    "softmax.int", "log_softmax.int", "cumsum", "cumprod", "prod", "prod.dim_int", "sum", "sum.dim_IntList",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
}
PROMOTE = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
}
# fmt: on
NOT_OVERRIDDEN = {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention"}
_installed: list[torch.library.Library] = []
_without_data: list[None] = []
_casts: dict[int, tuple[Tensor, Tensor]] = {}  # parameter by its identity, and what it was cast to


def install(*, compute_capability: tuple[int, int] | None) -> None:
    """Install the rules once; `compute_capability` says which attention kernels the GPU has."""
    if _installed:
        return
    library = torch.library.Library("aten", "IMPL")
    _installed.append(library)
    with warnings.catch_warnings():  # torch says that a kernel is replaced, which is the purpose
        warnings.simplefilter("ignore", UserWarning)
        _install_kernels(library, compute_capability=compute_capability)
    _install_autocast_questions()
    install_for_no_data()


def install_natively(*, compute_capability: tuple[int, int]) -> None:
    """Install the rules for fake CUDA tensors once: PyTorch chooses, except where it has no answer.

    With fake tensors, PyTorch adds no bias or mask in place, does not know what cuDNN keeps of a recurrent
    layer or how the fused layers of a transformer run, and sees the weights of a recurrent layer as one.
    """
    if _installed:
        return
    from flatout.memory.cuda import attention, encoder_layer, recurrent, recurrent_cells

    library = torch.library.Library("aten", "IMPL")
    _installed.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        library.impl("linear", _linear, "AutogradCUDA")
        _answer_groups(library)
        attention.install_natively(library)
        encoder_layer.install(library, compute_capability=compute_capability, key="AutogradCUDA")
        recurrent.install(library, key="AutogradCUDA")
        recurrent_cells.answer(library)
    layers: Any = nn.RNNBase
    layers.flatten_parameters = lambda self: None
    install_for_no_data()


def install_for_no_data() -> None:
    """Install what fake tensors need on any device; once per process."""
    if _without_data:
        return
    _without_data.append(None)
    _install_foreach()
    _install_scaler()
    _install_module_apply()
    _install_no_capture()
    _install_values()
    # draws until every value lies within its bounds, which without data is never
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor


def _install_values() -> None:
    """Let tensors without data be copied with the values known of them, and print single numbers."""
    tensors: Any = FakeTensor
    tensors.__deepcopy__ = known_values.copy_with_value
    tensors.__format__ = known_values.format_number


def _install_no_capture() -> None:
    """Keep optimizers from asking CUDA about graph capture, which a forked child cannot do."""
    optimizer: Any = torch.optim.Optimizer
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        if hasattr(optimizer, name):  # the first until torch 2.12
            setattr(optimizer, name, lambda self: None)


def _install_kernels(library: torch.library.Library, *, compute_capability: tuple[int, int] | None) -> None:
    from flatout.memory.cuda import attention, encoder_layer, norms, recurrent, recurrent_cells

    _install_autocast(library)
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("linear", _linear, "AutogradCPU")
    _answer_groups(library)
    library.impl("softmax.int", _softmax_like(aten._softmax.default), "AutogradCPU")
    library.impl("log_softmax.int", _softmax_like(aten._log_softmax.default), "AutogradCPU")
    attention.install(library, compute_capability=compute_capability)
    encoder_layer.install(library, compute_capability=compute_capability)
    recurrent.install(library)
    recurrent_cells.install(library)
    norms.install(library)


def _answer_groups(library: torch.library.Library) -> None:
    # torch answers in Python as well, which until 2.12 must be said to be meant.
    library.impl("_grouped_mm", _grouped_product, "Meta", allow_override=True)


def after_imports() -> None:
    """Apply the rules for libraries that building the model has imported."""
    loaded: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in loaded:
        # transformers takes tensors without data for a compiler's and then keeps masks it would drop
        # (asked of what is loaded alone: its lazy modules import what they are asked for)
        if name.startswith("transformers") and "is_tracing" in vars(module):
            module.is_tracing = _never


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _install_autocast(library: torch.library.Library) -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    for name in names:
        short = name.removeprefix("aten::")
        on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
        on_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
        if short in NOT_OVERRIDDEN:
            continue
        if on_cpu and not on_cuda:
            library.impl(short, torch.library.fallthrough_kernel, "AutocastCPU")
        elif short in OWN_DTYPE or short in PROMOTE or (on_cuda and not on_cpu):
            library.impl(short, _cast_kernel(short), "AutocastCPU")


def _install_autocast_questions() -> None:
    """Let the CPU's autocast stand for CUDA's when no device is named, and forget casts when it forgets.

    Questions that name CUDA are left alone: `torch.utils.checkpoint` would switch CUDA's own autocast on.
    """
    questions: Any = torch
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    questions.is_autocast_enabled = lambda device_type="cpu": is_enabled(device_type)
    questions.get_autocast_gpu_dtype = lambda: dtype_of("cpu")
    forget = torch.clear_autocast_cache

    def forget_casts() -> None:
        _casts.clear()
        forget()

    questions.clear_autocast_cache = forget_casts


def _cast_kernel(short: str) -> Callable[..., Any]:
    base, _, overload = short.partition(".")
    op = getattr(getattr(aten, base), overload or "default")
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    names = [argument.name for argument in op._schema.arguments]

    def with_own_dtype(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(off):
            if args[0].dtype in HALF and kwargs.get("dtype") is None:
                place = names.index("dtype")
                if len(args) <= place or args[place] is None:
                    args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(off):
            to = _dtype_for(short, (*args, *kwargs.values()))
            return op(*_cast_all(args, to), **{name: _cast_all(v, to) for name, v in kwargs.items()})

    return with_own_dtype if short in OWN_DTYPE else cast


def _dtype_for(short: str, values: tuple[Any, ...]) -> torch.dtype:
    if short in LOWER or "convolution" in short:
        return torch.get_autocast_dtype("cpu")
    if short in PROMOTE:
        dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
        return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
    return torch.float32


def _cast_all(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        fits = value.dtype in (torch.float32, *HALF) and value.dtype is not to
        return _cast_once(value, to) if fits else value
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return type(value)(_cast_all(each, to) for each in value)
    return tuple(_cast_all(each, to) for each in value) if isinstance(value, tuple) else value


def _cast_once(value: Tensor, to: torch.dtype) -> Tensor:
    """Cast a tensor; a parameter that goes to autocast's own dtype once for all its uses."""
    lasts = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and value._base is None
    if not lasts or to is torch.float32 or not torch.is_autocast_cache_enabled():
        return value.to(to)
    if id(value) not in _casts:
        _casts[id(value)] = (value, value.to(to))
    return _casts[id(value)][1]


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1:
        return torch.native_dropout(x, p, True)[0]
    return x if not train or p == 0 else x * 0


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run PyTorch's linear with the bias added in place, which PyTorch avoids for fake tensors."""
    if bias is None or x.dim() < 3 or x.is_contiguous():
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        result: Tensor = aten.linear.default._op_dk(composite, x, weight, bias)
        return result
    return torch.matmul(x, weight.t()).add_(bias)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an empty result whose rows begin at multiples of 16 bytes."""
    groups = [len(offs)] if offs is not None and left.dim() == right.dim() == 2 else []
    if left.dim() == right.dim() == 3:
        groups = [left.shape[0]]
    dtype = out_dtype or left.dtype
    rows, columns = left.shape[-2], right.shape[-1]
    aligned = round_up(columns * dtype.itemsize, 16) // dtype.itemsize
    strides = [rows * aligned, aligned, 1][-len(groups) - 2 :]
    return torch.empty_strided((*groups, rows, columns), strides, dtype=dtype, device=left.device)


def _softmax_like(kernel: Any) -> Callable[..., Tensor]:
    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if x.dtype is torch.float16 and dtype is torch.float32:
            result: Tensor = kernel(x, dim, True)
        else:
            result = kernel(x if dtype is None else x.to(dtype), dim, False)
        return result

    return softmax


def _install_foreach() -> None:
    places: list[Any] = [torch.utils._foreach_utils, sys.modules["torch.optim.optimizer"]]
    for module in places:
        supported = getattr(module, "_foreach_supported_types", None)
        if supported is not None and FakeTensor not in supported:
            supported.append(FakeTensor)
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            module._get_foreach_kernels_supported_devices = lambda: ["cuda", "cpu"]


def _install_scaler() -> None:
    def always_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = always_step


def _install_module_apply() -> None:
    """Let `Module.to` and its kin replace parameters, once for all places that share one.

    They replace the data behind a parameter, which fake tensors refuse.
    """
    plain: Callable[..., nn.Module] = nn.Module._apply
    every_module: Any = nn.Module

    def apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(), *self.buffers()]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return plain(self, function, recurse)
        replaced: dict[int, Any] = {}
        for module in self.modules():
            for group in (module._parameters, module._buffers):
                for name, tensor in group.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = (tensor, _apply_to(tensor, function))
                    group[name] = replaced[id(tensor)][1]
        return self

    every_module._apply = apply


def _apply_to(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        result = function(tensor.detach())
    if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)
    return result
