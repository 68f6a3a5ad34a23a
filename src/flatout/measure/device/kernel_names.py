"""Read what a kernel or operator does from its name.

A profiler gives only names.  The names of GPU kernels follow a handful of conventions: cuBLAS and cuDNN spell
operand types into theirs (`sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn...`, `ampere_sgemm_128x64_nn`,
`nvjet_tst_...`, in which t is bf16, h fp16, q fp8, s 32 bits), CUTLASS its instruction (`s1688gemm` is TF32),
and PyTorch's own are C++ templates with the functor inside.  Triton's names do not show their types.  A dtype
that cannot be read is None: a wrong one would mislead a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

CATEGORIES = (
    "matmul",
    "attention",
    "convolution",
    "normalisation",
    "reduction",
    "indexing",
    "elementwise",
    "copy",
    "communication",
    "optimizer",
    "other",
)


def _patterns(*rows: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Compile rows of a name and a pattern; the first pattern that matches decides."""
    return tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in rows)


# A template's arguments may mention what comes later.
_KERNEL_PATTERNS = _patterns(
    ("copy", r"^(memcpy|memset)\b"),
    ("communication", r"nccl|rccl|all_?reduce|reduce_?scatter|all_?gather"),
    ("optimizer", r"multi_tensor_apply|fused_?(adam|sgd|adagrad|lamb)|koptimizer"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("normalisation", r"(layer|batch|group|instance|rms)_?norm|rowwisemoments|gammabeta|\bbn_(fw|bw)|bnorm"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|im2col|col2im|nchwtonhwc|nhwctonchw"),
    ("matmul", r"gemm|gemv|nvjet|cutlass|xmma|wgmma|cublas|splitkreduce|_tem_fused_\w*mm|\bdot_kernel"),
    ("indexing", r"index|gather|scatter|embedding|compute_grad_weight|sum_and_scatter"),
    ("copy", r"copy_?kernel|catarraybatchedcopy|copy_device_to_device|transpose"),
    ("reduction", r"reduce|softmax|nll_?loss|cross_?entropy|scan_|devicescan|triton_(red|per)_"),
    ("elementwise", r"elementwise|vectorized|pointwise|unrolled|triton_poi_|dropout|distribution_"),
)

_DTYPE_PATTERNS = _patterns(
    ("fp8", r"e4m3|e5m2|fp8|float8"),
    ("tf32", r"tf32"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"(?<!b)fp?16(?!\d)|(?<!b)float16|half|hgemm|(?<![a-z])h(884|1688|16816)"),
    ("int8", r"(?<![a-z])(s8|i8|int8)(?!\d)|imma"),
    ("tf32", r"(?<![a-z])s1688"),
    ("fp64", r"dgemm|(?<![a-z])f64|\bdouble\b|(?<![a-z])d884"),
    ("fp32", r"sgemm|(?<![a-z])f32|\bfloat\b"),
)
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]+)_")
_NVJET_LETTERS = {"t": "bf16", "h": "fp16", "q": "fp8"}

_OPERATOR_CATEGORIES = {
    "matmul": "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear matmul _scaled_mm _grouped_mm einsum "
    "mkldnn_linear _weight_int8pack_mm",
    "attention": "scaled_dot_product_attention",
    "convolution": "convolution _convolution conv1d conv2d conv3d conv_transpose2d convolution_backward "
    "mkldnn_convolution thnn_conv2d _slow_conv2d_forward _slow_conv2d_backward convolution_overrideable",
    "normalisation": "layer_norm group_norm batch_norm instance_norm rms_norm",
    "reduction": "sum mean prod max min amax amin argmax argmin norm linalg_vector_norm std var var_mean "
    "softmax _softmax log_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp "
    "nll_loss_forward nll_loss_backward nll_loss cross_entropy_loss all any cumsum cumprod count_nonzero",
    "indexing": "index select slice gather scatter scatter_add embedding index_select index_put index_add "
    "_index_put_impl_ select_backward slice_backward embedding_dense_backward embedding_backward masked_fill "
    "masked_select take nonzero where unbind narrow select_scatter slice_scatter",
    "copy": "copy_ clone contiguous to _to_copy cat stack pad constant_pad_nd repeat repeat_interleave "
    "_local_scalar_dense item lift_fresh",
    "communication": "allreduce_ all_reduce reduce_scatter_ allgather_ broadcast_",
    "elementwise": "add sub rsub mul div pow neg exp log sqrt rsqrt reciprocal abs sign clamp clamp_min "
    "clamp_max relu gelu silu sigmoid tanh leaky_relu elu threshold_backward gelu_backward silu_backward "
    "tanh_backward sigmoid_backward addcmul addcdiv lerp eq ne lt le gt ge fill_ zero_ zeros ones full "
    "zeros_like ones_like full_like dropout native_dropout native_dropout_backward bernoulli bernoulli_ "
    "normal_ uniform_ random_ rand randn randint arange logical_not logical_and logical_or bitwise_and "
    "bitwise_not sin cos erf maximum minimum remainder floor_divide",
}
_CATEGORY_OF_OPERATOR = {
    name: category for category, names in _OPERATOR_CATEGORIES.items() for name in names.split()
}
_OPERATOR_WORDS = (
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")),
    ("optimizer", ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")),
    ("normalisation", ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm")),
    ("convolution", ("conv",)),
)

_FUSED = re.compile(
    r"fused_?(adam|sgd|adagrad|lamb)|koptimizer|multi_tensor_apply.*\bAdamFunctor", re.IGNORECASE
)
# Gradient clipping and zero_grad use the foreach kernels of norms, products and zeros with any optimizer.
_FOREACH_KERNEL = re.compile(r"multi_tensor_apply_kernel.*(PointwiseOp|TernaryOp|BinaryOpListAlpha|UnaryOp)")
_FOREACH_OPERATORS = ("lerp", "addcmul", "addcdiv", "sqrt", "add", "sub")


@functools.lru_cache(maxsize=4096)
def kernel_category(name: str) -> str:
    """Return the category of a GPU kernel, copy or fill."""
    return next((category for category, pattern in _KERNEL_PATTERNS if pattern.search(name)), "other")


@functools.lru_cache(maxsize=4096)
def kernel_dtype(name: str) -> str | None:
    """Return the number format of a GPU kernel (fp32, tf32, bf16, ...); None if its name does not show it."""
    if name.startswith(("triton_", "Memcpy", "Memset")):
        return None
    nvjet = _NVJET.search(name)
    if nvjet:
        return "tf32" if "tf32" in name else _NVJET_LETTERS.get(nvjet[1][0])
    if "cudnn" in name and "sdpa" in name:  # f16 there means either 16-bit format
        return None
    return next((dtype for dtype, pattern in _DTYPE_PATTERNS if pattern.search(name)), None)


@functools.lru_cache(maxsize=4096)
def operator_category(name: str) -> str:
    """Return the category of an operator such as `aten::addmm`."""
    base = name.rpartition("::")[2]
    known = _CATEGORY_OF_OPERATOR.get(base) or _CATEGORY_OF_OPERATOR.get(base.removesuffix("_"))
    if known:
        return known
    return next(
        (category for category, words in _OPERATOR_WORDS if any(word in base for word in words)), "other"
    )


def copy_kind(name: str) -> str:
    """Shorten `Memcpy HtoD (Pageable -> Device)` to `HtoD pageable`: only the host's side matters."""
    match = re.match(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?", name)
    if not match:
        return name
    direction, source, target = match[1], match[2] or "", match[3] or ""
    host_side = source if direction == "HtoD" else target if direction == "DtoH" else ""
    return f"{direction} {host_side.lower()}".strip()


def optimizer_kind(names: Iterable[str]) -> str | None:
    """Return how the optimizer updates its parameters: "fused", "foreach", or None if no name shows it."""
    foreach = False
    for name in names:
        if _FUSED.search(name):
            return "fused"
        if _FOREACH_KERNEL.search(name):
            foreach = True
        base = name.rpartition("::")[2]
        if base.startswith("_foreach_") and base.removeprefix("_foreach_").rstrip("_") in _FOREACH_OPERATORS:
            foreach = True
    return "foreach" if foreach else None
