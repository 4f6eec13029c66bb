"""Step each of DeepSpeed's CPU optimizers, and compare with the same arithmetic in float64.

Runs in a clean environment, ``python optimizers.py REPORT.json``, and writes what it saw as JSON; the session judges
it. The ops are asked of the accelerator that ``DS_ACCELERATOR`` names.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_STEPS = 5
_ELEMENTS = 4099
_DECAY = 0.01


def main(report_path: str) -> None:
    """Step and write the report: file, OpenMP runtime and largest difference of each op. Whatever fails is raised."""
    # Where triton is installed, DeepSpeed asks the GPU for its capability while it is imported (0.16.9,
    # accelerator/cuda_accelerator.py, is_triton_supported), and here the accelerator is cuda without a GPU.
    sys.modules["triton"] = None  # type: ignore[assignment]
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    torch.manual_seed(0)
    report = {
        "cpu_adam": _run(DeepSpeedCPUAdam, "ds_opt_adam", _adam, lr=1e-3, weight_decay=_DECAY),
        "cpu_adagrad": _run(DeepSpeedCPUAdagrad, "ds_opt_adagrad", _adagrad, lr=1e-2, eps=1e-8),
        "cpu_lion": _run(DeepSpeedCPULion, "ds_opt_lion", _lion, lr=1e-3, betas=(0.9, 0.99), weight_decay=_DECAY),
    }
    with open(report_path, "w", encoding="utf-8") as stream:
        json.dump(report, stream)


def _run(optimizer_class: Any, attribute: str, expect: Any, **options: Any) -> dict[str, Any]:
    import torch

    parameter = torch.nn.Parameter(torch.randn(_ELEMENTS))
    expected, state = parameter.detach().double(), (torch.zeros(_ELEMENTS).double(), torch.zeros(_ELEMENTS).double())
    optimizer = optimizer_class([parameter], **options)
    for step in range(1, _STEPS + 1):
        gradient = torch.randn(_ELEMENTS)
        parameter.grad = gradient.clone()
        optimizer.step()
        expected = expect(expected, gradient.double(), state, step, options)
    module = getattr(optimizer, attribute)
    return {
        "file": module.__file__,
        "openmp": getattr(module, "openmp", None),
        "difference": (parameter.detach().double() - expected).abs().max().item(),
    }


def _adam(parameter: Any, gradient: Any, state: Any, step: int, options: Any) -> Any:
    mean, square = state
    mean.mul_(0.9).add_(gradient, alpha=0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    denominator = (square / (1 - 0.999**step)).sqrt() + 1e-8
    parameter = parameter * (1 - options["lr"] * options["weight_decay"])
    return parameter - options["lr"] * (mean / (1 - 0.9**step)) / denominator


def _adagrad(parameter: Any, gradient: Any, state: Any, step: int, options: Any) -> Any:
    state[0].addcmul_(gradient, gradient)
    return parameter - options["lr"] * gradient / (state[0].sqrt() + options["eps"])


def _lion(parameter: Any, gradient: Any, state: Any, step: int, options: Any) -> Any:
    (mean, _), (first, second) = state, options["betas"]
    update = (mean * first + gradient * (1 - first)).sign()
    mean.mul_(second).add_(gradient, alpha=1 - second)
    return parameter * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * update


if __name__ == "__main__":
    main(sys.argv[1])
