"""Say, for a target, which compiler flags and which variables DeepSpeed's setup.py must see."""

from __future__ import annotations

from collections.abc import Iterable

from dsops_builder.model import Target
from dsops_prebuilt._variant import GpuArch, Simd

# -march and DeepSpeed's macro belong together: the macro picks the kernel (csrc/includes/simd.h), -march lets the
# compiler assemble it. Macros by op_builder/builder.py, OpBuilder.simd_width (DeepSpeed 0.19.8).
_MARCH = {
    Simd.X86_64: "x86-64",
    Simd.X86_64_V3: "x86-64-v3",
    Simd.X86_64_V4: "x86-64-v4",
    Simd.AARCH64: "armv8-a",
}
_MACRO = {Simd.X86_64: "__SCALAR__", Simd.X86_64_V3: "__AVX256__", Simd.X86_64_V4: "__AVX512__"}
_MACHINE_MACROS = frozenset({*_MACRO.values(), "__NEON__", "__SVE__"})


def march(simd: Simd) -> str:
    """The ``-march`` flag of a SIMD level (GCC manual, "x86 Options" and "AArch64 Options")."""
    return f"-march={_MARCH[simd]}"


def simd_macro(simd: Simd) -> str:
    """The macro that makes DeepSpeed's kernels use a SIMD level."""
    return _MACRO[simd]


def portable_macro(simd: Simd, texts: Iterable[str]) -> str:
    """The macro of a level for sources whose files are ``texts``: on aarch64 NEON, if they know it (since 0.19.7)."""
    if simd is not Simd.AARCH64:
        return _MACRO[simd]
    return "__NEON__" if any("__NEON__" in text for text in texts) else "__SCALAR__"


def gencode(archs: Iterable[GpuArch]) -> tuple[str, ...]:
    """Flags of nvcc for an arch list: SASS for each, PTX where the token asks for it (nvcc manual, "--gpu-code")."""
    result = []
    for arch in archs:
        result.append(f"-gencode=arch=compute_{arch.number},code=sm_{arch.number}")
        if arch.ptx:
            result.append(f"-gencode=arch=compute_{arch.number},code=compute_{arch.number}")
    return tuple(result)


def has_bf16(archs: Iterable[GpuArch]) -> bool:
    """Whether DeepSpeed would define BF16_AVAILABLE: no arch below 8.0 (op_builder/builder.py, enable_bf16)."""
    return all(arch.major >= 8 for arch in archs)  # noqa: PLR2004  Ampere, the first with bf16


def defines(flags: Iterable[str]) -> tuple[str, ...]:
    """The macros among DeepSpeed's flags that are not of the build machine, sorted."""
    found = {flag[2:] for flag in flags if flag.startswith("-D")}
    return tuple(sorted(found - _MACHINE_MACROS))


def variables(target: Target, jobs: int) -> dict[str, str]:
    """The variables that steer DeepSpeed's setup.py (``DS_*``), torch's build (``MAX_JOBS``) and our own hook."""
    return {
        target.op.build_variable: "1",
        "DS_BUILD_OPS": "0",
        "DS_ENABLE_NINJA": "1",
        # Without it a machine with no GPU builds the CPU accelerator's kernels under the same op names.
        "DS_ACCELERATOR": target.accelerator,
        "DS_IGNORE_CUDA_DETECTION": "1",
        "DSOPS_DISABLE": "1",
        "MAX_JOBS": str(jobs),
    }
