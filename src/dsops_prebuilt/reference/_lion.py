"""Lion: csrc/lion/cpu_lion_impl.cpp and csrc/cpu/lion/fused_lion.cpp of DeepSpeed 0.19.8, whose sign is right."""

from __future__ import annotations

from typing import Any, List, Set

from dsops_prebuilt.reference._float32 import in_float32, log, require_kernel, require_optimizer, single, torch

_ids: Set[int] = set()


def create_lion(identity: int, *rest: Any) -> int:
    """``create_lion_optimizer``."""
    lr, beta1, beta2, weight_decay, should_log = rest
    _ids.add(identity)
    if should_log:
        log(f"Lion Optimizer #{identity} is created with torch arithmetic capability.")
        log(f"Config: alpha={lr:f}, betas=({beta1:f}, {beta2:f}), weight_decay={weight_decay:f}")
    return 0


def lion_update(identity: int, step: int, *rest: Any) -> int:
    """``ds_lion_step``."""
    require_optimizer("lion_update", _ids, identity)
    _update(list(rest[:4]), list(rest[4:]))
    return 0


def _update(numbers: List[float], tensors: List[Any]) -> None:
    """One step; ``numbers`` are lr, betas and weight decay, ``tensors`` params, grads and exp_avg."""
    require_kernel("Lion", tensors[0], tensors[2])
    lr, beta1, beta2, weight_decay = map(single, numbers)
    kept = single(1 - single(lr * weight_decay))
    left1, left2, size = single(1 - beta1), single(1 - beta2), torch.tensor(lr, dtype=torch.float32)

    def step(params: Any, grads: Any, exp_avg: Any) -> None:
        direction = (exp_avg * beta1).add_(grads, alpha=left1)
        if weight_decay > 0:
            params.mul_(kept)
        params.sub_(torch.copysign(size, direction))
        exp_avg.mul_(beta2).add_(grads, alpha=left2)

    in_float32(step, tensors, (0, 2))


def destroy_lion(identity: int) -> int:
    """``destroy_lion_optimizer``, which does not mind an id that is not there."""
    _ids.discard(identity)
    return 0


def multi_tensor_lion(chunk: int, noop: Any, lists: List[List[Any]], *rest: Any) -> None:
    """Every parameter in turn; ``chunk`` and ``noop`` are of the CUDA kernel, and step and mode change nothing."""
    lr, beta1, beta2, _step, _mode, weight_decay = rest
    for grads, params, exp_avg in zip(*lists):
        _update([lr, beta1, beta2, weight_decay], [params, grads, exp_avg])
