"""Adam and AdamW: csrc/adam/cpu_adam_impl.cpp and csrc/cpu/adam/fused_adam.cpp of DeepSpeed 0.19.8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

from dsops_prebuilt.reference._float32 import (
    in_float32,
    log,
    power,
    quotient,
    require_kernel,
    require_optimizer,
    root,
    single,
    torch,
)

_WRITTEN = (0, 2, 3)
_INFINITE = torch.tensor(math.inf)
_Step = Callable[[Any, Any, Any, Any], None]


@dataclass(frozen=True)
class _Numbers:
    """The numbers of one step, in float32: ``update_state`` of csrc/includes/cpu_adam.h."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float
    correction2: float
    adamw: bool

    @property
    def l2(self) -> float:
        """The weight decay that goes into the gradient. Only a positive one counts."""
        return self.weight_decay if self.weight_decay > 0 and not self.adamw else 0.0

    @property
    def shrink(self) -> float:
        """AdamW's: what is added to a parameter, by parameter."""
        return single(-self.lr * self.weight_decay) if self.weight_decay > 0 and self.adamw else 0.0


class _Optimizer:
    """``Adam_Optimizer``: a mode, and the powers of the betas at its last step."""

    def __init__(self, beta1: float, beta2: float, adamw: bool) -> None:
        self._adamw = adamw
        self._step = 0
        self._betas = single(beta1), single(beta2)
        self._powers = 1.0, 1.0

    def update(self, step: int, numbers: List[float], bias_correction: bool, tensors: List[Any]) -> None:
        """One step; ``numbers`` are lr, betas, eps and weight decay, ``tensors`` params, grads and both averages."""
        lr, beta1, beta2, eps, weight_decay = map(single, numbers)
        self._increment(step, beta1, beta2)
        require_kernel("Adam", tensors[0], tensors[2])
        correction1 = single(1 - self._powers[0]) if bias_correction else 1.0
        correction2 = quotient(1.0, root(single(1 - self._powers[1]))) if bias_correction else 1.0
        made = _Numbers(lr, beta1, beta2, eps, weight_decay, correction1, correction2, self._adamw)
        in_float32(_fused(made) or _plain(made), tensors, _WRITTEN)

    def _increment(self, step: int, beta1: float, beta2: float) -> None:
        """``IncrementStep``: a repeated step keeps the powers, the next one multiplies them, any other makes them."""
        same = (beta1, beta2) == self._betas
        if same and step == self._step:
            return
        if same and step == self._step + 1:
            self._powers = single(self._powers[0] * beta1), single(self._powers[1] * beta2)
        else:
            self._powers = power(beta1, step), power(beta2, step)
        self._betas, self._step = (beta1, beta2), step


def _plain(numbers: _Numbers) -> _Step:
    """``Step_1``, line by line."""
    beta1, beta2 = numbers.beta1, numbers.beta2
    left1, left2 = single(1 - beta1), single(1 - beta2)
    step_size = quotient(-numbers.lr, numbers.correction1)

    def step(params: Any, grads: Any, exp_avg: Any, exp_avg_sq: Any) -> None:
        gradient = torch.add(grads, params, alpha=numbers.l2) if numbers.l2 else grads
        exp_avg.mul_(beta1).add_(gradient, alpha=left1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=left2)
        divisor = exp_avg_sq.sqrt().mul_(numbers.correction2).add_(numbers.eps)
        if numbers.shrink:
            params.add_(params, alpha=numbers.shrink)
        params.addcdiv_(exp_avg, divisor, value=step_size)

    return step


def _fused(numbers: _Numbers) -> Optional[_Step]:
    """The same by torch's fused kernel (CPU: 2.4 and newer), which passes over memory once; None where it cannot.

    It makes the bias corrections itself, in double, out of the number of steps. Infinitely many make them 1, so that
    the sources' own, which are float32, can go into the learning rate and epsilon. AdamW's decay is none of its work:
    it multiplies by 1 - lr * weight_decay, which rounds the decay to a few bits.
    """
    kernel = getattr(torch, "_fused_adam_", None)
    beta1, beta2 = numbers.beta1, numbers.beta2
    rate = quotient(quotient(numbers.lr, numbers.correction1), numbers.correction2)
    eps = quotient(numbers.eps, numbers.correction2)
    usual = math.isfinite(rate) and math.isfinite(eps) and 0 <= beta1 < 1 and 0 <= beta2 < 1
    if kernel is None or not usual:
        return None

    def step(params: Any, grads: Any, exp_avg: Any, exp_avg_sq: Any) -> None:
        if numbers.shrink:
            params.add_(params, alpha=numbers.shrink)
        kernel(
            [params], [grads], [exp_avg], [exp_avg_sq], [], [_INFINITE], lr=rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=numbers.l2, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


_optimizers: Dict[int, _Optimizer] = {}
_modes: Dict[int, _Optimizer] = {}


def create_adam(identity: int, *rest: Any) -> int:
    """``create_adam_optimizer``."""
    lr, beta1, beta2, _eps, weight_decay, adamw, should_log = rest
    _optimizers[identity] = _Optimizer(beta1, beta2, adamw)
    if should_log:
        log(f"Adam Optimizer #{identity} is created with torch arithmetic capability.")
        betas = f"({beta1:f}, {beta2:f})"
        log(f"Config: alpha={lr:f}, betas={betas}, weight_decay={weight_decay:f}, adam_w={adamw:d}")
    return 0


def adam_update(identity: int, step: int, *rest: Any) -> int:
    """``ds_adam_step``."""
    require_optimizer("adam_update", _optimizers, identity)
    _optimizers[identity].update(step, list(rest[:5]), rest[5], list(rest[6:]))
    return 0


def adam_rollback(identity: int, step: int, *rest: Any) -> int:
    """``ds_adam_rollback``, of an AdamW step whatever the optimizer's mode."""
    tensors = rest[6:]
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        log("Error: Adam rollback currently only supports float32 tensors")
        return -1
    lr, beta1, beta2, eps, weight_decay = map(single, rest[:5])
    signed = (step + 2**31) % 2**32 - 2**31  # static_cast<int>
    correction1, correction2 = (single(1 - power(beta, signed)) for beta in (beta1, beta2))
    left1, left2 = single(1 - beta1), single(1 - beta2)
    kept = single(1 - single(lr * weight_decay))

    def back(params: Any, grads: Any, exp_avg: Any, exp_avg_sq: Any) -> None:
        update = (exp_avg / correction1).mul_(lr).div_((exp_avg_sq / correction2).sqrt_().add_(eps))
        params.add_(update).div_(kept).nan_to_num_(0.0, 0.0, 0.0)
        exp_avg.sub_(grads, alpha=left1).div_(beta1)
        exp_avg_sq.sub_((grads * left2).mul_(grads)).div_(beta2)

    in_float32(back, tensors, _WRITTEN)
    return 0


def destroy_adam(identity: int) -> int:
    """``destroy_adam_optimizer``, which does not mind an id that is not there."""
    _optimizers.pop(identity, None)
    return 0


def multi_tensor_adam(chunk: int, noop: Any, lists: List[List[Any]], *rest: Any) -> None:
    """Every parameter in turn, by an optimizer for each mode; ``chunk`` and ``noop`` are of the CUDA kernel."""
    *numbers, step, mode, bias_correction, weight_decay = rest
    optimizer = _modes.setdefault(mode, _Optimizer(0.0, 0.0, mode == 1))
    for grads, params, exp_avg, exp_avg_sq in zip(*lists):
        tensors = [params, grads, exp_avg, exp_avg_sq]
        optimizer.update(step % 2**64, [*numbers, weight_decay], bool(bias_correction), tensors)
