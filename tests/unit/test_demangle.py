import pytest

from gputail.demangle import MAX_CHARS, short

ELEMENTWISE = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIN3c104HalfEEESt5arrayIPcLm3EEEEviT0_T1_"


@pytest.mark.parametrize(
    "name, readable",
    [
        ("_Z15victim_gemm_f16PKfS0_Pf", "victim_gemm_f16"),
        (ELEMENTWISE, "at::native::vectorized_elementwise_kernel"),
        (ELEMENTWISE[:70], "at::native::vectorized_elementwise_kernel"),  # cut off: no valid name any more
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("_ZN12_GLOBAL__N_16kernelEv", "anonymous::kernel"),
        ("", ""),
        ("_Z", "_Z"),
        ("_Z999x", "_Z999x"),
        ("<<<(((", "<<<((("),
    ],
)
def test_a_kernels_name_is_what_people_call_it(name: str, readable: str) -> None:
    assert short(name) == readable


@pytest.mark.parametrize(
    "name", ["x" * 224, "_ZN" + "1a" * 110, "_Z" + "N" * 222, "_Z1f" + "I" * 220, "_Z1f" + "PP" * 110, "a<" * 112, "\0\x1b[2J"]
)
def test_no_name_is_too_much(name: str) -> None:
    assert len(short(name)) <= MAX_CHARS
