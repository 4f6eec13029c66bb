"""Compare two modules of cpu_adam bit by bit, and both with double precision: ``python parity.py FIRST SECOND [SIZE...]``.

Either may be a stock extension or a portable library. Prints JSON: for each combination of dtypes the number of words,
how many differ, the largest difference in units in the last place, and each one's largest error against float64, in
units in the last place too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import ModuleType

import torch

if __name__ == "__main__":
    ROOT = Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.torch.opening import open_any

SIZES = (*range(1, 130), 255, 256, 257, 1000, 1023, 1024, 1025, 4096, 4097)
LARGE = (300_007, 10_000_007)
DTYPES = {
    "float32/float32": (torch.float32, torch.float32),
    "float16/float32": (torch.float16, torch.float32),
    "float16/float16": (torch.float16, torch.float16),
    "bfloat16/float32": (torch.bfloat16, torch.float32),
    "bfloat16/bfloat16": (torch.bfloat16, torch.bfloat16),
}
STEPS = 3
_RATE, _BETA1, _BETA2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8

State = list[torch.Tensor]


@dataclass(frozen=True)
class Mode:
    """How an optimizer is set."""

    adamw: bool
    decay: float
    correction: bool


MODES = tuple(Mode(*values) for values in product((True, False), (0.0, 0.01), (True, False)))


@dataclass
class Comparison:
    """What was found for one combination of dtypes."""

    words: int = 0
    differing: int = 0
    largest_ulps: int = 0
    first_error_ulps: float = 0.0
    second_error_ulps: float = 0.0


def compare(
    first: ModuleType, second: ModuleType, sizes: Iterable[int] = SIZES, modes: Iterable[Mode] = MODES
) -> dict[str, Comparison]:
    """The comparison of each combination of dtypes, over every size and mode, after each of three steps."""
    found = {name: Comparison() for name in DTYPES}
    for mode, size, (name, dtypes) in product(modes, sizes, DTYPES.items()):
        for one, other, exact in zip(
            _trained(first, size, dtypes, mode),
            _trained(second, size, dtypes, mode),
            _exact(size, dtypes, mode),
            strict=True,
        ):
            _note(found[name], one, other, exact)
    return found


def _note(found: Comparison, one: State, other: State, exact: State) -> None:
    for left, right in zip(one, other, strict=True):
        distance = (_ordered(left) - _ordered(right)).abs()
        found.words += left.numel()
        found.differing += int((distance != 0).sum())
        found.largest_ulps = max(found.largest_ulps, int(distance.max()))
    found.first_error_ulps = max(found.first_error_ulps, _error(one[0], exact[0]))
    found.second_error_ulps = max(found.second_error_ulps, _error(other[0], exact[0]))


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, one apart for neighbours; equal only for equal bits."""
    width = 8 * tensor.element_size()
    bits = tensor.view(torch.int16 if width == 16 else torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(2 ** (width - 1)) - bits - 1)


def _error(made: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance in units in the last place, of the parameter or of the step, whichever is larger."""
    scale = torch.maximum(exact.abs(), torch.full_like(exact, _RATE))
    _, exponent = torch.frexp(scale)
    unit = torch.ldexp(torch.full_like(exact, torch.finfo(made.dtype).eps), exponent - 1)
    return float(((made.double() - exact).abs() / unit).max())


def _start(size: int, dtypes: tuple[torch.dtype, torch.dtype]) -> State:
    generator = torch.Generator().manual_seed(size)
    params = torch.randn(size, generator=generator).to(dtypes[0])
    return [params, torch.zeros(size, dtype=dtypes[1]), torch.zeros(size, dtype=dtypes[1])]


def _gradient(size: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size * STEPS + step)).to(dtype)


def _trained(module: ModuleType, size: int, dtypes: tuple[torch.dtype, torch.dtype], mode: Mode) -> Iterator[State]:
    quiet = not dtypes
    module.create_adam(0, _RATE, _BETA1, _BETA2, _EPSILON, mode.decay, mode.adamw, quiet)
    params, *states = _start(size, dtypes)
    numbers = (_RATE, _BETA1, _BETA2, _EPSILON, mode.decay, mode.correction)
    for step in range(1, STEPS + 1):
        module.adam_update(0, step, *numbers, params, _gradient(size, step, dtypes[0]), *states)
        yield [tensor.clone() for tensor in (params, *states)]
    module.destroy_adam(0)


def _exact(size: int, dtypes: tuple[torch.dtype, torch.dtype], mode: Mode) -> Iterator[State]:
    """Each step in double precision, from what the one before it was rounded to, as the kernels' results are."""
    params, average, square = (tensor.double() for tensor in _start(size, dtypes))
    for step in range(1, STEPS + 1):
        gradient = _gradient(size, step, dtypes[0]).double()
        if not mode.adamw:
            gradient = gradient + mode.decay * params
        average = _BETA1 * average + (1 - _BETA1) * gradient
        square = _BETA2 * square + (1 - _BETA2) * gradient * gradient
        first, second = (1 - _BETA1**step, 1 - _BETA2**step) if mode.correction else (1.0, 1.0)
        change = average / first / ((square / second).sqrt() + _EPSILON)
        if mode.adamw:
            params = params * (1 - _RATE * mode.decay)
        params = params - _RATE * change
        yield [params, average, square]


def main(first: str, second: str, *sizes: str) -> None:
    """Print the comparison of two files."""
    found = compare(open_any(Path(first)), open_any(Path(second)), [int(size) for size in sizes] or SIZES)
    print(json.dumps({name: asdict(comparison) for name, comparison in found.items()}, indent=1))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
