"""Tensors that C++ holds beyond a call stay alive as long as it does, and no longer."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.torch.calls import tensors

Group = list[torch.Tensor]


def group() -> Group:
    return tensors(64) + tensors(64)


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_a_registered_group_is_kept_until_its_worker_is_destroyed(adam: ModuleType) -> None:
    first, second = adam.zenflow_adam_create(0, [0]), adam.zenflow_adam_create(0, [])
    references = []
    for handle in (first, first, second):
        made = group()
        adam.zenflow_adam_register_group(handle, *made)
        references += [weakref.ref(tensor) for tensor in made]
        del made
    assert alive(references) == 24
    adam.zenflow_adam_destroy(first)
    assert alive(references) == 8
    adam.zenflow_adam_destroy(second)
    assert alive(references) == 0


def test_one_tensor_may_be_registered_twice(adam: ModuleType) -> None:
    handle = adam.zenflow_adam_create(0, [0])
    tensor = torch.ones(64)
    references = [weakref.ref(tensor)]
    adam.zenflow_adam_register_group(handle, *[tensor] * 8)
    del tensor
    assert alive(references) == 1
    adam.zenflow_adam_destroy(handle)
    assert alive(references) == 0


@pytest.mark.parametrize("last", ["worker", "value", "tensor", "dtype"])
def test_nothing_is_kept_of_a_call_that_failed(adam: ModuleType, last: str) -> None:
    handle = adam.zenflow_adam_create(0, [0])
    made = group()
    references = [weakref.ref(tensor) for tensor in made]
    changed: dict[str, list[Any]] = {
        "worker": [999, *made],
        "value": ["x", *made],
        "tensor": [handle, *made[:7], None],
        "dtype": [handle, *made[:7], made[7].half()],
    }
    with pytest.raises((IndexError, TypeError)):
        adam.zenflow_adam_register_group(*changed[last])
    changed.clear()
    del made
    assert alive(references) == 0
    adam.zenflow_adam_destroy(handle)


def test_the_tensors_of_a_step_are_not_kept(adam: ModuleType, opened: dict[str, ModuleType]) -> None:
    made = tensors()
    references = [weakref.ref(tensor) for tensor in made]
    adam.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, *made)
    lists = [[made[1]], [made[0]], [made[2]], [made[3]]]
    flag = torch.zeros(1)
    references.append(weakref.ref(flag))
    opened["fused_adam"].multi_tensor_adam(1, flag, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    del made, lists, flag
    assert alive(references) == 0


def test_a_copy_of_a_gradient_lives_through_its_call(adam: ModuleType) -> None:
    wide = torch.rand(4, 8)[:, ::2]
    for _ in range(100):
        made = tensors((4, 4))
        adam.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, made[0], wide, *made[2:])
        assert torch.isfinite(made[0]).all()
