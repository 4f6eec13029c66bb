"""Compute as the kernels do: scalars in float32, tensors widened to float32 piece by piece, and rounded once."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from struct import Struct
from typing import Any, Callable, Container, Dict, Sequence, Tuple

torch: Any = import_module("torch")

_FLOAT = Struct("<f")
PIECE = 2**18
"""Elements at a time. Measured: temporaries of all elements take five times as long for 1e7 bfloat16 parameters."""
_NAMES: Dict[Any, str] = {
    getattr(torch, name): shown
    for name, shown in (
        ("uint8", "Byte"), ("int8", "Char"), ("int16", "Short"), ("int32", "Int"), ("int64", "Long"),
        ("float16", "Half"), ("float32", "Float"), ("float64", "Double"), ("complex32", "ComplexHalf"),
        ("complex64", "ComplexFloat"), ("complex128", "ComplexDouble"), ("bool", "Bool"), ("bfloat16", "BFloat16"),
    )
}  # fmt: skip
"""``c10::toString`` of a dtype (torch/headeronly/core/ScalarType.h)."""
_KERNELS = {
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
}
"""``InvokerInitializer`` of csrc/*/cpu_*.cpp (0.19.8): the dtypes of parameters and of state."""


def single(value: float) -> float:
    """The nearest float32. A sum, product, quotient or root of two of them, rounded so, is what C++ float gives."""
    try:
        number: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return number


def quotient(one: float, other: float) -> float:
    """``one / other`` in float32, where zero divides."""
    if other:
        return single(one / other)
    return one * math.copysign(math.inf, other)  # 0 * inf is the NaN of 0 / 0


def root(value: float) -> float:
    """``sqrt`` in float32, of a negative number too."""
    return single(math.sqrt(value)) if value >= 0 else math.nan


def power(base: float, exponent: int) -> float:
    """``std::pow(float, size_t)``, which computes in double, assigned to a float."""
    try:
        return single(base ** float(exponent))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def require_kernel(optimizer: str, params: Any, state: Any) -> None:
    """Raise :class:`RuntimeError`, in the sources' words, for dtypes that have no kernel."""
    if (params.dtype, state.dtype) not in _KERNELS:
        kinds = f"param type {_NAMES[params.dtype]} and state type {_NAMES[state.dtype]}"
        raise RuntimeError(f"{optimizer} optimizer with {kinds} is not supported on current hardware")


def in_float32(step: Callable[..., None], tensors: Sequence[Any], written: Tuple[int, ...]) -> None:
    """Have ``step`` change float32 pieces of contiguous tensors in place; those at ``written`` keep the change.

    Like a kernel it leaves no trace in autograd: neither a graph nor a new version of a tensor.
    """
    whole = [tensor.data.view(-1) for tensor in tensors]
    with torch.inference_mode():  # no_grad alone refuses to write tensors that were made in it
        for start in range(0, whole[0].numel(), PIECE):
            pieces = [tensor[start : start + PIECE] for tensor in whole]
            wide = [piece.float() for piece in pieces]  # a float32 one is the piece itself
            step(*wide)
            for index in written:
                if wide[index] is not pieces[index]:
                    pieces[index].copy_(wide[index])


def require_optimizer(function: str, there: Container[int], identity: int) -> None:
    """Raise :class:`ValueError` for an id that was never created, or was destroyed."""
    if identity not in there:
        raise ValueError(f"{function}: there is no optimizer {identity}; it was not created, or it was destroyed")


def log(line: str) -> None:
    """Write to stdout, where the sources' ``printf`` writes."""
    sys.stdout.write(f"{line}\n")
