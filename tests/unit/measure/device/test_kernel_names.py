from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.device.kernel_names import (
    CATEGORIES,
    copy_kind,
    kernel_category,
    kernel_dtype,
    operator_category,
    optimizer_kind,
)

AT = "void at::native::"
# Names as the profiler gives them on Volta to Blackwell.
KERNELS = [
    ("nvjet_tst_128x64_64x8_2x1_v_bz_TNN", "matmul", "bf16"),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul", "fp16"),
    ("nvjet_sm100_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT", "matmul", "bf16"),
    ("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_TNT", "matmul", "fp8"),
    ("nvjet_sss_tf32_128x256_TNT", "matmul", "tf32"),
    ("nvjet_ssh_128x256_TNT", "matmul", None),
    ("sm90_xmma_gemm_f32f32_f32_nn_n_tilesize128x128x32_execute_kernel__5x_cublas", "matmul", "fp32"),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1", "matmul", "fp32"),
    ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4", "matmul", "tf32"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matmul", "bf16"),
    ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", "matmul", "fp16"),
    ("sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "matmul", "fp8"),
    ("ampere_sgemm_128x64_nn", "matmul", "fp32"),
    ("volta_sgemm_32x128_tn", "matmul", "fp32"),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "matmul", "bf16"),
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_relu_f2f_stages_32x5_tn", "matmul", "fp16"),
    ("turing_h1688gemm_128x128_ldg8_stages_32x1_tn", "matmul", "fp16"),
    ("volta_h884gemm_64x64_ldg8_tn", "matmul", "fp16"),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "matmul", "fp16"),
    ("cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4", "matmul", "tf32"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>(Params)", "matmul", "tf32"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(Params)", "matmul", "fp32"),
    (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "matmul",
        "bf16",
    ),
    ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", "matmul", "fp32"),
    ("void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 1, 32, 4>", "matmul", "bf16"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", "matmul", "bf16"),
    ("ampere_dgemm_128x64_nn", "matmul", "fp64"),
    ("triton_tem_fused_addmm_relu_3", "matmul", None),
    (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>",
        "attention",
        "bf16",
    ),
    ("void pytorch_flash::flash_bwd_kernel<Traits<64, cutlass::half_t>>", "attention", "fp16"),
    ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)", "attention", "fp32"),
    ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(Params)", "attention", "bf16"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention", None),
    (
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
        "convolution",
        "bf16",
    ),
    ("void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, true>", "convolution", "fp32"),
    ("cutlass_tensorop_s1688wgrad_optimized_tf32_128x128_16x4_nhwc_align4", "convolution", "tf32"),
    ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", "convolution", "fp16"),
    ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1>", "normalisation", "fp32"),
    (
        f"{AT}(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>",
        "normalisation",
        "bf16",
    ),
    (f"{AT}(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>", "normalisation", "fp32"),
    (
        f"{AT}batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float>",
        "normalisation",
        "fp32",
    ),
    (f"{AT}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise", "fp32"),
    (f"{AT}vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::Half>>", "elementwise", "fp16"),
    (
        f"{AT}elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "copy",
        None,
    ),
    (f"{AT}(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>", "copy", "fp32"),
    (
        f"{AT}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>",
        "reduction",
        "fp32",
    ),
    (f"{AT}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", "reduction", "fp32"),
    (f"{AT}index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<float>>", "indexing", "fp32"),
    (f"{AT}(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int>", "indexing", "fp32"),
    (
        f"{AT}(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "optimizer",
        "fp32",
    ),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", "bf16"),
    ("triton_poi_fused_add_relu_0", "elementwise", None),
    ("triton_per_fused_native_layer_norm_2", "normalisation", None),
    ("Memcpy HtoD (Pageable -> Device)", "copy", None),
    ("Memset (Device)", "copy", None),
    ("my_own_kernel", "other", None),
]


@pytest.mark.parametrize(("name", "category", "dtype"), KERNELS, ids=[row[0][:60] for row in KERNELS])
def test_kernels(name: str, category: str, dtype: str | None) -> None:
    assert (kernel_category(name), kernel_dtype(name)) == (category, dtype)


@given(st.text())
def test_any_name_has_a_known_category(name: str) -> None:
    assert kernel_category(name) in CATEGORIES
    assert operator_category(name) in CATEGORIES


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::addmm", "matmul"),
        ("aten::add_", "elementwise"),
        ("aten::select_backward", "indexing"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copy"),
        ("aten::sum", "reduction"),
        ("library::something", "other"),
    ],
)
def test_operators(name: str, category: str) -> None:
    assert operator_category(name) == category


def test_the_operator_table_names_operators_that_exist() -> None:
    from flatout.measure.device.kernel_names import _CATEGORY_OF_OPERATOR

    outside = {"allreduce_", "all_reduce", "reduce_scatter_", "allgather_", "broadcast_"}
    names = set(_CATEGORY_OF_OPERATOR) - outside
    assert len(names) > 100
    missing = {
        name
        for name in names
        if not hasattr(torch.ops.aten, name) and not hasattr(torch.ops.aten, name + "_")
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "HtoD pageable"),
        ("Memcpy HtoD (Pinned -> Device)", "HtoD pinned"),
        ("Memcpy DtoH (Device -> Pageable)", "DtoH pageable"),
        ("Memcpy DtoH (Device -> Pinned)", "DtoH pinned"),
        ("Memcpy DtoD (Device -> Device)", "DtoD"),
        ("Memcpy PtoP (Device -> Device)", "PtoP"),
    ],
)
def test_copies(name: str, kind: str) -> None:
    assert copy_kind(name) == kind


MULTI_TENSOR = f"{AT}(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, "


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([f"{MULTI_TENSOR}FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW, false>>"], "fused"),
        ([f"{MULTI_TENSOR}PointwiseOpScalarFunctor<float, 4, 3, 3>>"], "foreach"),
        ([f"{MULTI_TENSOR}BinaryOpListAlphaFunctor<float, 2, 2, 0>>"], "foreach"),
        ([f"{MULTI_TENSOR}LpNormFunctor<float, NormType::L2, float, 1, 1, 0>>"], None),
        ([f"{MULTI_TENSOR}BinaryOpScalarTensorFunctor<float, 1, 1, 0>>"], None),
        (["aten::_fused_adamw_"], "fused"),
        (["aten::_foreach_addcdiv_", "aten::_foreach_norm"], "foreach"),
        (["aten::_foreach_norm", "aten::_foreach_mul_"], None),
        (["aten::add_"], None),
    ],
)
def test_optimizer_kinds(names: list[str], kind: str | None) -> None:
    assert optimizer_kind(names) == kind
