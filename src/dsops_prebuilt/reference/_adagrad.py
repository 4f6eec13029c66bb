"""Adagrad: csrc/adagrad/cpu_adagrad.cpp of DeepSpeed 0.19.8, where weight decay enters the step too."""

from __future__ import annotations

from typing import Any, Set

from dsops_prebuilt.reference._float32 import in_float32, log, require_kernel, require_optimizer, single, torch

_ids: Set[int] = set()


def create_adagrad(identity: int, lr: float, eps: float, weight_decay: float, should_log: bool) -> int:
    """``create_adagrad_optimizer``."""
    _ids.add(identity)
    if should_log:
        log(f"Adagrad Optimizer #{identity} is created with torch arithmetic capability.")
        log(f"Config: alpha={lr:f}, weight_decay={weight_decay:f}")
    return 0


def adagrad_update(identity: int, step: int, *rest: Any) -> int:
    """``ds_adagrad_step``: like the scalar kernel it leaves the update in ``grads``."""
    require_optimizer("adagrad_update", _ids, identity)
    tensors = rest[3:]
    require_kernel("Adagrad", tensors[0], tensors[2])
    lr, epsilon, decay = map(single, rest[:3])

    def update(params: Any, grads: Any, exp_avg_sq: Any) -> None:
        gradient = torch.add(grads, params, alpha=decay) if decay > 0 else grads
        exp_avg_sq.addcmul_(gradient, gradient)
        torch.div(gradient, exp_avg_sq.sqrt().add_(epsilon), out=grads)
        grads.mul_(-lr)
        params.add_(grads)

    in_float32(update, tensors, (0, 1, 2))
    return 0


def destroy_adagrad(identity: int) -> int:
    """``destroy_adagrad_optimizer``, which does not mind an id that is not there."""
    _ids.discard(identity)
    return 0
