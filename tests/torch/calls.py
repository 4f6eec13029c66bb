"""Calls of cpu_adam that both the stock module and the portable one must answer in the same way, and those they need not."""

from __future__ import annotations

import decimal
import fractions
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

np: Any = importlib.import_module("numpy")

OPTIMIZER = (1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
NUMBERS = (0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.01, True)
HUGE = 10**30


class Index:
    """An integer by its __index__ alone."""

    def __index__(self) -> int:
        return 1


class Broken:
    """No number, in the end."""

    def __index__(self) -> int:
        raise ZeroDivisionError

    __float__ = __bool__ = __index__


class Subclass(torch.Tensor):  # type: ignore[misc]
    """A user's tensor."""


def tensors(
    size: Any = 16, params: torch.dtype = torch.float32, state: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Parameters, gradients and two states."""
    made = torch.Generator().manual_seed(0)
    kinds = (params, params, state or params, state or params)
    return [torch.rand(size, generator=made).mul_(10).to(kind) for kind in kinds]


def update(module: ModuleType, *, at: int | None = None, value: Any = None, **parts: Any) -> Any:
    """``adam_update`` of fresh tensors with one argument in place of its own."""
    args: list[Any] = [*NUMBERS, *parts.get("tensors", tensors())]
    if at is not None:
        args[at] = value
    return module.adam_update(*args)


# What comes out: a value, or the type of the exception. The stock module gives the same.
ALIKE: dict[str, tuple[Callable[[ModuleType], Any], Any]] = {
    "all is well": (update, 0),
    "an id by __index__": (lambda m: m.create_adam(Index(), *OPTIMIZER), 0),
    "a step from numpy": (lambda m: update(m, at=1, value=np.int64(3)), 0),
    "a step from a narrow float of numpy": (lambda m: update(m, at=1, value=np.float32(3.7)), 0),
    "a step from a tensor": (lambda m: update(m, at=1, value=torch.tensor(3.0)), 0),
    "a step from an array": (lambda m: update(m, at=1, value=np.array(3)), 0),
    "a step as Decimal": (lambda m: update(m, at=1, value=decimal.Decimal(3)), 0),
    "a step that is True": (lambda m: update(m, at=1, value=True), 0),
    "a step as float": (lambda m: update(m, at=1, value=3.0), TypeError),
    "a step as float of numpy": (lambda m: update(m, at=1, value=np.float64(3.0)), TypeError),
    "a step as text": (lambda m: update(m, at=1, value="3"), TypeError),
    "no step": (lambda m: update(m, at=1, value=None), TypeError),
    "a step below zero": (lambda m: update(m, at=1, value=-1), TypeError),
    "a step of 2**64 - 1": (lambda m: update(m, at=1, value=2**64 - 1), 0),
    "a step of 2**64": (lambda m: update(m, at=1, value=2**64), TypeError),
    "a step that raises": (lambda m: update(m, at=1, value=Broken()), TypeError),
    "an id of 2**31": (lambda m: m.create_adam(2**31, *OPTIMIZER), TypeError),
    "an id of -2**31": (lambda m: m.create_adam(-(2**31), *OPTIMIZER), 0),
    "an id of 2**63": (lambda m: m.destroy_adam(2**63), TypeError),
    "a rate as int": (lambda m: update(m, at=2, value=1), 0),
    "a rate as Fraction": (lambda m: update(m, at=2, value=fractions.Fraction(1, 2)), 0),
    "a rate from a tensor": (lambda m: update(m, at=2, value=torch.tensor(0.5)), 0),
    "a rate from tensors": (lambda m: update(m, at=2, value=torch.ones(2)), TypeError),
    "a rate of NaN": (lambda m: update(m, at=2, value=float("nan")), 0),
    "a rate beyond a float": (lambda m: update(m, at=2, value=1e300), 0),
    "a rate beyond a double": (lambda m: update(m, at=2, value=10**400), TypeError),
    "a rate as text": (lambda m: update(m, at=2, value="1"), TypeError),
    "a rate as bytes": (lambda m: update(m, at=2, value=b"1"), TypeError),
    "a rate that is complex": (lambda m: update(m, at=2, value=1j), TypeError),
    "no rate": (lambda m: update(m, at=2, value=None), TypeError),
    "a flag of 1": (lambda m: update(m, at=7, value=1), 0),
    "a flag of -1": (lambda m: update(m, at=7, value=-1), 0),
    "a flag of 10**30": (lambda m: update(m, at=7, value=HUGE), 0),
    "a flag of 0.5": (lambda m: update(m, at=7, value=0.5), 0),
    "a flag from numpy": (lambda m: update(m, at=7, value=np.True_), 0),
    "a flag that is None": (lambda m: update(m, at=7, value=None), 0),
    "a flag as text": (lambda m: update(m, at=7, value="x"), TypeError),
    "a flag as list": (lambda m: update(m, at=7, value=[]), TypeError),
    "a flag that raises": (lambda m: update(m, at=7, value=Broken()), TypeError),
    "parameters that are None": (lambda m: update(m, at=8, value=None), TypeError),
    "parameters as text": (lambda m: update(m, at=8, value="x"), TypeError),
    "parameters as array": (lambda m: update(m, at=8, value=np.ones(16, np.float32)), TypeError),
    "parameters as list": (lambda m: update(m, at=8, value=[1.0] * 16), TypeError),
    "empty tensors": (lambda m: update(m, tensors=tensors(0)), 0),
    "tensors without dimensions": (lambda m: update(m, tensors=tensors(())), 0),
    "tensors of two dimensions": (lambda m: update(m, tensors=tensors((4, 4))), 0),
    "a leaf that requires a gradient": (lambda m: update(m, at=8, value=tensors()[0].requires_grad_()), 0),
    "a Parameter": (lambda m: update(m, at=8, value=torch.nn.Parameter(tensors()[0])), 0),
    "a subclass": (lambda m: update(m, at=8, value=tensors()[0].as_subclass(Subclass)), 0),
    "a gradient of another layout": (lambda m: update(m, at=9, value=torch.rand(4, 8)[:, ::2]), 0),
    "a gradient that is expanded": (lambda m: update(m, at=9, value=torch.rand(1).expand(16)), 0),
    "doubles": (lambda m: update(m, tensors=tensors(params=torch.float64)), RuntimeError),
    "integers": (lambda m: update(m, tensors=tensors(params=torch.int32)), RuntimeError),
    "a state of another dtype": (lambda m: update(m, tensors=tensors(state=torch.float16)), RuntimeError),
    "no argument": (lambda m: m.adam_update(), TypeError),
    "one argument too many": (lambda m: m.adam_update(*NUMBERS, *tensors(), 1), TypeError),
    "a keyword": (lambda m: m.adam_update(*NUMBERS, *tensors()[:3], exp_avg_sq=tensors()[3]), TypeError),
    "a keyword of create": (lambda m: m.create_adam(0, *OPTIMIZER[:-1], should_log=False), TypeError),
    "defaults of create": (lambda m: m.create_adam(0), TypeError),
    "an optimizer twice": (lambda m: [m.create_adam(0, *OPTIMIZER) for _ in "ab"], [0, 0]),
    "a destruction twice": (lambda m: [m.destroy_adam(77) for _ in "ab"], [0, 0]),
    "a rollback": (lambda m: m.adam_rollback(*NUMBERS, *tensors()), 0),
    "a rollback of no optimizer": (lambda m: m.adam_rollback(99, *NUMBERS[1:], *tensors()), 0),
    "a rollback of halves": (lambda m: m.adam_rollback(*NUMBERS, *tensors(params=torch.float16)), -1),
    "an affinity as tuple": (lambda m: type(m.zenflow_adam_create(0, (0,))), int),
    "an affinity as array": (lambda m: type(m.zenflow_adam_create(0, np.array([0]))), int),
    "an affinity as text": (lambda m: m.zenflow_adam_create(0, "0"), TypeError),
    "an affinity as bytes": (lambda m: m.zenflow_adam_create(0, b"0"), TypeError),
    "an affinity as dict": (lambda m: m.zenflow_adam_create(0, {0: 0}), TypeError),
    "an affinity as number": (lambda m: m.zenflow_adam_create(0, 0), TypeError),
    "an affinity of floats": (lambda m: m.zenflow_adam_create(0, [0.0]), TypeError),
    "a group of no worker": (lambda m: m.zenflow_adam_register_group(999, *[tensors()[0]] * 8), IndexError),
    "a worker of no handle": (lambda m: m.zenflow_adam_run_worker(999, 1), IndexError),
    "too many groups": (lambda m: m.zenflow_adam_ctrl_init(block(m).data_ptr(), 1025), RuntimeError),
    "the block's size": (lambda m: m.zenflow_adam_ctrl_size(), 21592),
    "the end of no worker": (lambda m: m.zenflow_adam_destroy(999), None),
}


def block(module: ModuleType) -> torch.Tensor:
    """The memory of a control block."""
    return torch.zeros(module.zenflow_adam_ctrl_size(), dtype=torch.uint8)


def outcome(call: Callable[[ModuleType], Any], module: ModuleType) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return call(module)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the outcome
        return type(error)


def differing(module: ModuleType) -> list[tuple[str, str]]:
    """The calls whose outcome is not what is written here, each with its outcome."""
    found = []
    for name, (call, expected) in ALIKE.items():
        module.create_adam(0, *OPTIMIZER)
        result = outcome(call, module)
        if result != expected:
            found.append((name, repr(result)))
    return found
