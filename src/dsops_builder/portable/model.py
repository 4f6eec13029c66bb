"""The frozen values of the portable tier: Closure -> Expansion -> PortableArtifact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsops_builder.model import Op
from dsops_prebuilt._manifest import SourceDigest
from dsops_prebuilt._variant import Simd


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """An op's sources in the releases that have them byte for byte alike, headers included.

    ``csrc`` is the folder of one of them; ``releases`` are sorted, oldest first.
    """

    op: Op
    releases: tuple[str, ...]
    csrc: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """What the preprocessor makes of sources for one SIMD level.

    ``sha256`` is the digest of the whole text that the compiler would compile; ``macro`` is DeepSpeed's for the level;
    ``closure`` names the files below csrc that were read, and ``closure_sha256`` is their digest, which the loader
    computes again from the installed DeepSpeed.
    """

    sources: Sources
    simd: Simd
    macro: str
    sha256: str
    closure: tuple[str, ...]
    closure_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PortableArtifact:
    """One shared library, stripped, and the source digests that it stands for: all compile to these bytes."""

    op: Op
    simd: Simd
    kernel: str
    path: Path
    sources: tuple[SourceDigest, ...]

    @property
    def file(self) -> str:
        """Its place below the manifest: ``cpu_adam/ds0.19.8/x86_64_v3/cpu_adam_op.avx256.so``, by its first release."""
        first = self.sources[0].deepspeed[0]
        return f"{self.op.id}/ds{first}/{self.simd}/{self.op.name}_op.{self.kernel}.so"
