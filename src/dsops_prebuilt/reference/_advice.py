"""Say, where the processor has no SIMD level above the baseline, whether torch's fused kernel is the faster one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import Any, Callable, Dict

from dsops_prebuilt._notice import tell_once
from dsops_prebuilt.reference import module_of

PARAMETERS = 2**18
"""Few enough for a few milliseconds in all, and so many that the cost of a call is none of the result."""
BUDGET = 0.02
"""Seconds, of which three turns may take more where the machine is busy."""
_LEAST = 3
_ID = -(2**31)
"""DeepSpeed counts its optimizers from 0."""
_NUMBERS = (1e-3, 0.9, 0.999, 1e-8, 0.01, True)
_QUIET = False


@cache
def advise(op: str, module: ModuleType) -> None:
    """Measure ``module``, a scalar kernel, against the reference, and say on stderr which is faster; once.

    It is advice, so whatever goes wrong with it is nothing to stop at. Only for ``cpu_adam``, of which torch has a
    fused kernel.
    """
    if op != "cpu_adam":
        return
    try:
        if hasattr(import_module("torch"), "_fused_adam_"):
            seconds = measure({"scalar": module, "fused": module_of(op)})
            tell_once(sentence(seconds["scalar"], seconds["fused"]))
    except Exception:  # noqa: BLE001 - see above
        return


def sentence(scalar: float, fused: float) -> str:
    """Which of two kernels is faster, given the seconds of one step, and what chooses."""
    fact = "this processor has no SIMD level above x86_64, so cpu_adam is DeepSpeed's scalar kernel"
    test = f"with {PARAMETERS} float32 parameters on one thread"
    if fused < scalar:
        other = f"torch's fused kernel is {scalar / fused:.1f} times as fast {test}"
        return f"{fact}; {other}. DSOPS_TIER=reference chooses it"
    return f"{fact}; it is {fused / scalar:.1f} times as fast as torch's fused one {test}"


def measure(modules: Dict[str, Any], clock: Callable[[], float] = perf_counter) -> Dict[str, float]:
    """The shortest time of one AdamW step by each module, by name, in seconds; they take turns.

    On one thread: where others compute too, a step of several threads is mostly their waiting for each other.
    """
    torch = import_module("torch")
    threads = torch.get_num_threads()
    tensors = [torch.full((PARAMETERS,), 0.5) for _ in range(4)]
    best = dict.fromkeys(modules, float("inf"))
    for module in modules.values():
        module.create_adam(_ID, *_NUMBERS, _QUIET)
    torch.set_num_threads(1)
    try:
        number, begun = 0, clock()
        while number < _LEAST or clock() < begun + BUDGET:
            number += 1
            for name, module in modules.items():
                start = clock()
                module.adam_update(_ID, number, *_NUMBERS, *tensors)
                best[name] = min(best[name], clock() - start)
    finally:
        torch.set_num_threads(threads)
        for module in modules.values():
            module.destroy_adam(_ID)
    return best
