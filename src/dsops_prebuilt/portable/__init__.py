"""The portable tier: DeepSpeed's kernels behind a C ABI of ours, which bind to no torch, CUDA or Python."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dsops_prebuilt._manifest import TIERS, Artifact
from dsops_prebuilt.portable._functions import make_functions
from dsops_prebuilt.portable._library import Library
from dsops_prebuilt.portable._openmp import bind_openmp


class PortableTier:
    """Opens a shared library of ``ops/_portable`` and gives it the functions of the stock extension module."""

    name = "portable"
    rank = TIERS.index("portable")

    def open(self, artifact: Artifact, path: Path) -> ModuleType:
        """A module like the stock one, with a ``__file__``; ``openmp`` in it is the path of the runtime, or None.

        Raises :class:`OSError` for a file that cannot be loaded and :class:`ImportError` for one of another ABI.
        """
        library = Library(str(path))
        module = ModuleType(artifact.module)
        module.__file__ = str(path)
        module.__doc__ = f"{artifact.op} of the portable tier, {artifact.simd}"
        vars(module).update(make_functions(library), openmp=bind_openmp(library))
        return module


TIER = PortableTier()
