"""The flags of a target."""

from __future__ import annotations

import pytest

from dsops_builder import flags
from dsops_prebuilt._variant import GpuArch, Simd


def archs(text: str) -> tuple[GpuArch, ...]:
    return tuple(GpuArch.parse(token) for token in text.split())


@pytest.mark.parametrize(
    ("level", "march", "macro"),
    [
        (Simd.X86_64, "-march=x86-64", "__SCALAR__"),
        (Simd.X86_64_V3, "-march=x86-64-v3", "__AVX256__"),
        (Simd.X86_64_V4, "-march=x86-64-v4", "__AVX512__"),
    ],
    ids=str,
)
def test_march_and_macro_of_a_level_belong_together(level: Simd, march: str, macro: str) -> None:
    assert (flags.march(level), flags.simd_macro(level)) == (march, macro)


@pytest.mark.parametrize(
    ("level", "texts", "macro"),
    [
        pytest.param(Simd.X86_64, ("#if defined(__NEON__)",), "__SCALAR__", id="x86_64"),
        pytest.param(Simd.X86_64_V4, (), "__AVX512__", id="x86_64_v4"),
        pytest.param(Simd.AARCH64, ("int x;", "#elif defined(__NEON__)"), "__NEON__", id="sources that know NEON"),
        pytest.param(Simd.AARCH64, ("#if defined(__AVX512__)",), "__SCALAR__", id="sources that do not"),
    ],
)
def test_macro_of_a_level_for_sources(level: Simd, texts: tuple[str, ...], macro: str) -> None:
    assert flags.portable_macro(level, texts) == macro


def test_march_of_aarch64() -> None:
    assert flags.march(Simd.AARCH64) == "-march=armv8-a"


def test_every_architecture_is_native_code_and_ptx_comes_where_asked() -> None:
    assert flags.gencode(archs("7.0 9.0a 12.0+PTX")) == (
        "-gencode=arch=compute_70,code=sm_70",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    )


@pytest.mark.parametrize(("text", "answer"), [("8.0 9.0", True), ("7.5 9.0", False), ("10.0 12.0", True)])
def test_one_architecture_below_8_turns_bf16_off_as_in_deepspeed(text: str, answer: bool) -> None:
    assert flags.has_bf16(archs(text)) is answer


def test_macros_of_the_machine_are_no_part_of_what_a_binary_stands_for() -> None:
    found = flags.defines(["-O3", "-D__AVX512__", "-DVERSION_GE_1_5", "-DBF16_AVAILABLE", "-U__X__", "-D__NEON__"])
    assert found == ("BF16_AVAILABLE", "VERSION_GE_1_5")
