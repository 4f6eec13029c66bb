"""The portable tier: which DeepSpeed releases have the same code, and one shared library for each that differs."""

from dsops_builder.portable.build import PortableCompiler, build_portable
from dsops_builder.portable.model import PortableArtifact

__all__ = ["PortableArtifact", "PortableCompiler", "build_portable"]
