"""Which GPU architectures nvcc compiles, by CUDA release.

Sources: CUDA Toolkit release notes (new and removed architectures) and what ``nvcc --list-gpu-code`` prints for 11.8
(35 to 90), 12.4 (50 to 90) and 13.0 (75 to 121). An architecture that NVIDIA adds is one line here.
"""

from __future__ import annotations

from dsops_prebuilt._variant import CudaRelease, GpuArch

_OLDEST = CudaRelease(11, 8)
_NEWEST = CudaRelease(99, 0)
_LAST_11 = CudaRelease(11, 8)
_LAST_12 = CudaRelease(12, 9)
_12_8, _12_9, _13_0 = CudaRelease(12, 8), CudaRelease(12, 9), CudaRelease(13, 0)

# Capability with its feature suffix: the first release that compiles it (of those since 11.8) and the last.
_RELEASES = {
    **dict.fromkeys(("3.5", "3.7"), (_OLDEST, _LAST_11)),
    **dict.fromkeys(("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2"), (_OLDEST, _LAST_12)),
    **dict.fromkeys(("7.5", "8.0", "8.6", "8.7", "8.9", "9.0"), (_OLDEST, _NEWEST)),
    "9.0a": (CudaRelease(12, 0), _NEWEST),
    **dict.fromkeys(("10.0", "10.0a", "12.0", "12.0a"), (_12_8, _NEWEST)),
    # sm_101 was renamed sm_110 in CUDA 13.0.
    **dict.fromkeys(("10.1", "10.1a"), (_12_8, _LAST_12)),
    "10.1f": (_12_9, _LAST_12),
    **dict.fromkeys(("10.0f", "10.3", "10.3a", "10.3f", "12.0f", "12.1", "12.1a", "12.1f"), (_12_9, _NEWEST)),
    **dict.fromkeys(("8.8", "11.0", "11.0a", "11.0f"), (_13_0, _NEWEST)),
}


def capabilities(toolkit: CudaRelease | None = None) -> tuple[str, ...]:
    """Capabilities that ``toolkit`` compiles, in order: ``8.0``, ``9.0a``; those of every release for None."""
    names = (name for name, (first, last) in _RELEASES.items() if toolkit is None or first <= toolkit <= last)
    return tuple(sorted(names, key=GpuArch.parse))


def capability(arch: GpuArch) -> str:
    """``9.0a`` of ``9.0a+PTX``: the name that :func:`capabilities` lists."""
    return f"{arch.major}.{arch.minor}{arch.suffix}"
