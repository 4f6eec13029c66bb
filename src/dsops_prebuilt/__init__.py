"""Prebuilt DeepSpeed ops: ``pip install``, import deepspeed, and nothing is compiled.

Nothing runs when this package is imported, and nothing but the standard library is imported by it; DeepSpeed is reached
through ``dsops_prebuilt_activate`` when DeepSpeed itself is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional

if TYPE_CHECKING:
    from types import ModuleType

    from dsops_prebuilt._errors import DsopsError, IntegrityError, LoadError, ManifestError, NoArtifactError, UsageError
    from dsops_prebuilt._select import Selection
    from dsops_prebuilt._variant import GpuArch, Simd

__version__ = "0.1.0"

__all__ = [
    "DsopsError",
    "GpuArch",
    "IntegrityError",
    "LoadError",
    "ManifestError",
    "NoArtifactError",
    "Selection",
    "Simd",
    "UsageError",
    "activate",
    "explain",
    "load",
]

_HOMES = {
    "_errors": {"DsopsError", "IntegrityError", "LoadError", "ManifestError", "NoArtifactError", "UsageError"},
    "_select": {"Selection"},
    "_variant": {"GpuArch", "Simd"},
}


def activate() -> None:
    """Attach to DeepSpeed now if it is imported, else when it will be; for where no ``.pth`` file is processed.

    Repeating it is harmless. ``DSOPS_DISABLE=1`` makes it do nothing.
    """
    import dsops_prebuilt_activate

    dsops_prebuilt_activate.install()


def explain(op: str, accelerator: Optional[str] = None) -> Selection:
    """Every installed artifact of ``op`` and, for each, why it may or may not be loaded here; loads nothing.

    ``op`` is a DeepSpeed builder's ``NAME`` (``cpu_adam``); ``accelerator`` is ``cuda`` or ``cpu``, by default the one
    that DeepSpeed would use on this machine. Imports torch. Raises :class:`UsageError` for a word of ``DSOPS_SIMD``
    that is not a SIMD level of this machine, or of ``DSOPS_TIER`` that is no tier.
    """
    from dsops_prebuilt import _load

    return _load.choose(op, accelerator)


def load(op: str, accelerator: Optional[str] = None) -> ModuleType:
    """Open the artifact of ``op`` that fits this machine, and return its module; arguments as for :func:`explain`.

    ``DSOPS_ON_MISS=reference`` and ``DSOPS_TIER=reference`` make it the module of the reference tier, plain torch.
    Raises :class:`NoArtifactError` when none fits, :class:`IntegrityError` when the chosen file is not the recorded
    one, :class:`LoadError` when the dynamic loader refuses it. Nothing is written and no process is started.
    """
    from dsops_prebuilt import _load

    return _load.load(op, accelerator)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted([*__all__, "__version__"])
