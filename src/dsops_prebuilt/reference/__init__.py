"""The reference tier: DeepSpeed's CPU optimizers in plain torch, for where the settings ask for it."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Dict, Optional

from dsops_prebuilt._catalogue import CPU_OPTIMIZERS
from dsops_prebuilt._host import Host
from dsops_prebuilt._notice import tell_once
from dsops_prebuilt._select import Request

ARITHMETIC = "0.19.8"
"""The DeepSpeed release whose arithmetic this is, as its scalar kernels write it down."""
_BEFORE: Dict[str, str] = {
    "cpu_adagrad": "before 0.19.8 weight decay enters the accumulator only, here the step too",
    "cpu_lion": "before 0.19.8 the compiled vector kernels misread the sign of the update",
    "fused_adam": "before 0.19.6 the compiled kernel takes L2 mode for AdamW",
    "fused_lion": "before 0.19.8 the compiled vector kernels misread the sign of the update",
}


def objection(request: Request, host: Host) -> Optional[str]:
    """Why the reference cannot serve the request, in a sentence without a final stop; None where it can."""
    if request.accelerator not in CPU_OPTIMIZERS.get(request.op, ()):
        return f"it has no {request}, only DeepSpeed's CPU optimizers"
    if host.torch is None:
        return "torch is not installed or cannot be imported"
    return None


def serve(request: Request, host: Host) -> ModuleType:
    """The op's module, to whose user one line says what it costs; the request has no :func:`objection`."""
    module = module_of(request.op)
    cost = "a step takes up to several times as long as with the compiled op, depending on the dtype"
    line = f"{request} is served by the reference tier, plain torch: {cost}; its arithmetic is DeepSpeed {ARITHMETIC}'s"
    if host.deepspeed != ARITHMETIC and request.op in _BEFORE:
        line += f", and DeepSpeed {host.deepspeed or 'of an unknown release'} is installed: {_BEFORE[request.op]}"
    tell_once(f"{line}. `dsops explain {request.op} --accelerator {request.accelerator}` says why")
    return module


@cache
def module_of(op: str) -> ModuleType:
    """A module like the stock one of ``op``, which is one of :data:`CPU_OPTIMIZERS`. Imports torch."""
    from dsops_prebuilt.reference._functions import functions_of

    module = ModuleType(f"dsops_prebuilt.reference.{op}")
    module.__file__ = __file__
    module.__doc__ = f"{op} in plain torch, with the arithmetic of DeepSpeed {ARITHMETIC}."
    vars(module).update(functions_of(op))
    return module
