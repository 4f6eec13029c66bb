"""ZenFlow's worker process beside plain steps, as deepspeed/runtime/zenflow/zenflow_utils.py drives it: a script."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tests.torch.opening import open_any

SIZES = (1, 63, 1000, 70_001)
STEPS = 6
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def worker(path: Path, groups: list[list[torch.Tensor]], control: torch.Tensor, ready: Any) -> None:
    """The optimizer's process."""
    op = open_any(path)
    enabled = bool(groups)
    op.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, enabled, not enabled)
    handle = op.zenflow_adam_create(0, sorted(os.sched_getaffinity(0)))
    for param, grad0, grad1, stale in groups:
        states = [torch.zeros_like(param) for _ in range(4)]
        op.zenflow_adam_register_group(handle, param, grad0, grad1, *states, stale)
    ready.set()
    op.zenflow_adam_run_worker(handle, control.data_ptr())
    op.zenflow_adam_destroy(handle)
    op.destroy_adam(0)


def overlapped(path: Path) -> list[torch.Tensor]:
    """The parameters and the snapshots after the steps of a worker."""
    op = open_any(path)
    groups = [[tensor.share_memory_() for tensor in _group(size)] for size in SIZES]
    control = torch.zeros(op.zenflow_adam_ctrl_size(), dtype=torch.uint8).share_memory_()
    op.zenflow_adam_ctrl_init(control.data_ptr(), len(groups))
    context = get_context("spawn")
    ready = context.Event()
    process = context.Process(target=worker, args=(path, groups, control, ready), daemon=True)
    process.start()
    if not ready.wait(60):
        raise TimeoutError("the worker is not ready")
    for step in range(1, STEPS + 1):
        now = step % 2
        for number, group in enumerate(groups):
            group[1 + now].copy_(_gradient(group[0].numel(), step, number))
        values = [[value] * len(groups) for value in HYPER.values()]
        op.zenflow_adam_submit(control.data_ptr(), now, step, *values, [1] * len(groups))
        while not op.zenflow_adam_wait(control.data_ptr(), 1.0):
            if not process.is_alive():
                raise ChildProcessError(f"the worker ended with {process.exitcode}")
    op.zenflow_adam_ctrl_exit(control.data_ptr())
    process.join(30)
    if process.exitcode != 0:
        raise ChildProcessError(f"the worker ended with {process.exitcode}")
    return [group[place].clone() for group in groups for place in (0, 3)]


def plain(path: Path) -> list[torch.Tensor]:
    """The same by steps in this process."""
    op = open_any(path)
    enabled = bool(SIZES)
    op.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, enabled, not enabled)
    params = [_group(size)[0] for size in SIZES]
    states = [[torch.zeros_like(param) for _ in range(4)] for param in params]
    for step in range(1, STEPS + 1):
        now = step % 2
        for number, (param, state) in enumerate(zip(params, states, strict=True)):
            gradient = _gradient(param.numel(), step, number)
            op.adam_update(0, step, *HYPER.values(), enabled, param, gradient, state[now], state[2 + now])
    op.destroy_adam(0)
    return [tensor for param in params for tensor in (param, param)]


def _group(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator), torch.zeros(size), torch.zeros(size), torch.zeros(size)]


def _gradient(size: int, step: int, number: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step * 100 + number))


def digest(results: list[torch.Tensor]) -> str:
    """One for equal bits."""
    return hashlib.sha256(b"".join(bytes(tensor.untyped_storage()) for tensor in results)).hexdigest()


def main(path: str) -> None:
    """Print both digests as JSON."""
    print(json.dumps([digest(overlapped(Path(path))), digest(plain(Path(path)))]))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
