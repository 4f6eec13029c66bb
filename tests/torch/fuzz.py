"""Call every function of a library with whatever hypothesis thinks of: ``python fuzz.py EXAMPLES PATH...``.

A call may return or raise what a Python function raises for bad arguments. Anything else, a signal above all, ends the
process, which is why it has one of its own. Raw addresses are 0 or a control block's; nobody can check others.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.torch.opening import open_portable
from torch._subclasses.fake_tensor import FakeTensorMode

REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, MemoryError, OverflowError)
BLOCK = torch.zeros(1 << 16, dtype=torch.uint8)
DTYPES = [
    *[torch.float32] * 6, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [*[(16,)] * 4, (0,), (1,), (), (4, 4), (17,), (0, 3), (2, 2, 4)]


def _fake(tensor: torch.Tensor) -> Any:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def _released(tensor: torch.Tensor) -> torch.Tensor:
    view = torch.cat([tensor.flatten(), tensor.flatten()])[tensor.numel() :]
    view.untyped_storage().resize_(0)
    return view


CHANGES: list[Callable[[torch.Tensor], Any]] = [
    *[lambda tensor: tensor] * 8,
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor: torch.cat([tensor.flatten()] * 2)[::2],
    lambda tensor: tensor.flatten()[:1].expand(16),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.to_sparse(),
    lambda tensor: tensor.to_mkldnn(),
    torch.nn.Parameter,
    lambda tensor: torch.nested.nested_tensor([tensor.flatten(), tensor.flatten()]),
    torch._neg_view,  # noqa: SLF001
    torch._to_functional_tensor,  # noqa: SLF001
    lambda tensor: torch._efficientzerotensor(tuple(tensor.shape)),  # noqa: SLF001
    _fake,
    _released,
]
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([-(2**31), 2**31, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(), st.complex_numbers(), st.text(max_size=3), st.binary(max_size=3), st.just(object()),
    st.lists(st.integers(-3, 3), max_size=3), st.dictionaries(st.integers(0, 3), st.none(), max_size=2),
)  # fmt: skip
SMALL = st.lists(st.one_of(st.integers(-2, 5), st.floats(-2, 2), ODD), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """A tensor of some kind."""
    plain = torch.ones(draw(st.sampled_from(SHAPES)), dtype=draw(st.sampled_from(DTYPES)))
    try:
        return draw(st.sampled_from(CHANGES))(plain)
    except REFUSALS:  # torch has no such tensor of this dtype
        return plain


@st.composite
def arguments(draw: st.DrawFn, letters: list[str]) -> list[Any]:
    """Fitting arguments, of which a few are something else."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(SHAPES))
    kinds: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: torch.ones(shape, dtype=dtype),
        "float": lambda: draw(st.floats()),
        "int": lambda: draw(st.integers(0, 3)),
        "bool": lambda: draw(st.booleans()),
        "list[list[Tensor]]": lambda: [[torch.ones(shape, dtype=dtype) for _ in "ab"] for _ in "abcd"],
    }
    made = [kinds[letter]() if letter in kinds else draw(SMALL) for letter in letters]
    for _ in range(draw(st.integers(0, 3))):
        if made:
            place = draw(st.integers(0, len(made) - 1))
            other = st.lists(st.lists(tensors(), max_size=2), max_size=4)
            made[place] = draw(st.one_of(tensors(), ODD, other, SMALL) if "Tensor" in letters[place] else ODD)
    if draw(st.integers(0, 9)) == 0:
        made = made[: draw(st.integers(0, len(made)))] + draw(st.lists(ODD, max_size=2))
    return made


def call(module: ModuleType, name: str, args: list[Any]) -> None:
    """Make the call; an address is the block's, and what would wait has what it waits for."""
    if name == "zenflow_adam_wait":
        args = [BLOCK.data_ptr(), *args[1:]] if args and args[0] else args
        args[1:2] = [value if isinstance(value, str) else 0.0 for value in args[1:2]]
    elif name in {"zenflow_adam_ctrl_init", "zenflow_adam_submit", "zenflow_adam_ctrl_exit"}:
        args = [BLOCK.data_ptr() if args[0] else 0, *args[1:]] if args else args
    elif name == "zenflow_adam_run_worker" and len(args) > 1:
        module.zenflow_adam_ctrl_init(BLOCK.data_ptr(), 1)
        module.zenflow_adam_ctrl_exit(BLOCK.data_ptr())
        args = [args[0], BLOCK.data_ptr() if args[1] else 0, *args[2:]]
    try:
        result = getattr(module, name)(*args)
    except REFUSALS:
        return
    if name == "zenflow_adam_create":
        module.zenflow_adam_destroy(result)


def fuzz(module: ModuleType, name: str, examples: int) -> None:
    """Call one function many times."""
    inside = getattr(module, name).__doc__.partition("(")[2].partition("):")[0]
    letters = inside.split(", ") if inside else []

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(arguments(letters))
    def run(args: list[Any]) -> None:
        call(module, name, args)

    run()


def main(examples: str, *paths: str) -> None:
    """Fuzz every function of every library, and print how many there were."""
    warnings.simplefilter("ignore")
    count = 0
    for path in paths:
        module = open_portable(Path(path))
        for name, function in vars(module).copy().items():
            if callable(function):
                if hasattr(module, "create_adam"):
                    module.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 0)
                fuzz(module, name, int(examples))
                count += 1
    print(f"{count} functions", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
