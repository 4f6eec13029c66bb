"""What this release has: payloads, for which torch, Python and accelerator, and what comes with the loader itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple


@dataclass(frozen=True)
class Payload:
    """A payload wheel by its label; ``torch`` are minor releases, ``python`` tags, ``ops`` accelerators by op."""

    label: str
    torch: Tuple[str, ...]
    python: Tuple[str, ...]
    ops: Dict[str, Tuple[str, ...]]

    @property
    def cuda(self) -> Optional[str]:
        """The CUDA release in the label: ``11.8`` of ``cu118``."""
        return f"{self.label[2:-1]}.{self.label[-1]}" if self.label.startswith("cu") else None


CPU_OPTIMIZERS: Dict[str, Tuple[str, ...]] = {
    "cpu_adagrad": ("cpu", "cuda"),
    "cpu_adam": ("cpu", "cuda"),
    "cpu_lion": ("cpu", "cuda"),
    "fused_adam": ("cpu",),
    "fused_lion": ("cpu",),
}
"""Accelerators by op: what the portable tier and the reference hold. No payload has to be installed for these."""
PLATFORMS: Dict[str, Tuple[int, int]] = {"aarch64": (2, 24), "x86_64": (2, 24)}
"""Where the loader's wheel brings the portable tier: by machine, the glibc of the wheel's tag."""
PAYLOADS: Tuple[Payload, ...] = (
    Payload(
        label="cpu",
        torch=("2.13",),
        python=("cp311",),
        ops={"cpu_adam": ("cpu", "cuda")},
    ),
    Payload(
        label="cu118",
        torch=("2.7",),
        python=("cp311",),
        ops={"cpu_adam": ("cpu", "cuda"), "fused_adam": ("cuda",)},
    ),
)
