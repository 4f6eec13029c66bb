from __future__ import annotations

import pytest

from dsops_prebuilt import UsageError
from dsops_prebuilt._variant import CudaRelease, Gpu, GpuArch, Simd, TorchBuild


@pytest.mark.parametrize("level", list(Simd), ids=str)
def test_simd_is_what_it_prints(level: Simd) -> None:
    assert Simd.parse(str(level)) is level


def test_unknown_simd_level_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        Simd.parse("x86_64_v5")
    assert str(caught.value) == (
        "'x86_64_v5' is not a SIMD level; did you mean x86_64_v4? accepted: x86_64, x86_64_v3, x86_64_v4, aarch64"
    )


@pytest.mark.parametrize(
    ("code", "host", "runs"),
    [
        (Simd.X86_64, Simd.X86_64_V4, True),
        (Simd.X86_64_V3, Simd.X86_64_V3, True),
        (Simd.X86_64_V4, Simd.X86_64_V3, False),
        (Simd.AARCH64, Simd.X86_64_V4, False),
        (Simd.X86_64, Simd.AARCH64, False),
        (Simd.AARCH64, Simd.AARCH64, True),
    ],
    ids=str,
)
def test_simd_levels_include_the_lower_ones_of_the_same_machine(code: Simd, host: Simd, runs: bool) -> None:
    assert code.runs_on(host) is runs


@pytest.mark.parametrize("token", ["7.5", "8.0", "9.0a", "10.0f", "12.0+PTX", "12.1", "10.3a"])
def test_gpu_arch_is_what_it_prints(token: str) -> None:
    assert str(GpuArch.parse(token)) == token


@pytest.mark.parametrize("token", ["", "9", "90", "9.0b", "9.00", "0.9", "9.0+ptx", "100.0"])
def test_what_is_no_gpu_arch_is_refused(token: str) -> None:
    with pytest.raises(UsageError) as caught:
        GpuArch.parse(token)
    assert str(caught.value) == (
        f"{token!r} is not a GPU architecture; accepted: a compute capability such as 8.0, 9.0a, 10.0f or 12.0+PTX"
    )


@pytest.mark.parametrize(
    ("version", "minor", "release"),
    [
        ("2.7.1", "2.7", True),
        ("2.7.1+cu126", "2.7", True),
        ("2.10.0+cpu", "2.10", True),
        ("2.7.0+rocm6.3", "2.7", True),
        ("2.8.0.dev20250601+cu128", "2.8", False),
        ("2.5.0a0+872d972e41.nv24.08", "2.5", False),
        ("2.7.1+git1234", "2.7", False),
        ("2.7.1+cu126.custom", "2.7", False),
        ("custom", "custom", False),
    ],
)
def test_torch_builds(version: str, minor: str, release: bool) -> None:
    assert (TorchBuild(version).minor, TorchBuild(version).is_release) == (minor, release)


@pytest.mark.parametrize(("text", "release"), [("11.8", CudaRelease(11, 8)), ("12.6.77", CudaRelease(12, 6))])
def test_cuda_releases(text: str, release: CudaRelease) -> None:
    assert CudaRelease.parse(text) == release
    assert CudaRelease.parse(str(release)) == release


def test_cuda_releases_are_ordered_as_numbers() -> None:
    assert CudaRelease.parse("12.10") > CudaRelease.parse("12.9")


@pytest.mark.parametrize("text", ["12", "cu126", "12.x", ""])
def test_what_is_no_cuda_release_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a CUDA release; accepted: MAJOR\.MINOR, such as 11\.8"):
        CudaRelease.parse(text)


@pytest.mark.parametrize(
    ("arch", "capability", "runs", "compiles"),
    [
        ("8.0", (8, 0), True, True),
        ("8.0", (8, 6), True, True),
        ("8.6", (8, 0), False, False),
        ("8.0", (9, 0), False, True),
        ("9.0", (8, 9), False, False),
        ("9.0a", (9, 0), True, True),
        ("10.0a", (10, 3), False, False),
        ("9.0a", (10, 0), False, False),
        ("10.0f", (10, 0), True, True),
        ("10.0f", (10, 3), True, True),
        ("10.3f", (10, 0), False, False),
        ("10.0f", (12, 0), False, False),
        ("12.0", (12, 1), True, True),
    ],
)
def test_which_gpu_runs_what(arch: str, capability: tuple[int, int], runs: bool, compiles: bool) -> None:
    gpu = Gpu("GPU-1", *capability)
    assert (gpu.runs(GpuArch.parse(arch)), gpu.compiles(GpuArch.parse(arch))) == (runs, compiles)
