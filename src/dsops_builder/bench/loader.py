"""Measure what the loader costs: at a start of Python, side by side with a Python without it, and at the first load."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsops_builder.process import Runner
from dsops_builder.smoke.environment import CleanEnvironment
from dsops_builder.venv import make_venv

STARTS = 300
LOADS = 15
_LOAD = """
import deepspeed, time
start = time.perf_counter()
deepspeed.ops.adam.cpu_adam.CPUAdamBuilder().load()
print("seconds", time.perf_counter() - start)
"""


def measure_starts(interpreter: Path, core: Path, folder: Path, runner: Runner) -> dict[str, Any]:
    """``python -c pass`` with and without the wheel ``core`` installed, in milliseconds."""
    starts = _starts(interpreter, core, folder, runner)
    without, with_loader = (statistics.median(starts[name]) for name in ("without", "with"))
    return {
        "start_without_ms": _spread(starts["without"]),
        "start_with_ms": _spread(starts["with"]),
        "start_difference_ms": round((with_loader - without) * 1e3, 3),
        "start_ratio": round(with_loader / without, 3),
    }


def measure_loads(environment: CleanEnvironment, variables: Mapping[str, str]) -> dict[str, float]:
    """The first load of cpu_adam after ``import deepspeed``, each in a process of its own, in milliseconds."""
    printed = [environment.run(["-c", _LOAD], **variables) for _ in range(LOADS)]
    return _spread([float(text.rpartition("seconds ")[2]) for text in printed])


def _starts(interpreter: Path, core: Path, folder: Path, runner: Runner) -> dict[str, list[float]]:
    """Seconds of ``python -c pass`` in two environments that differ in the loader's wheel alone, in random order."""
    pythons = {name: make_venv(folder / name, interpreter, runner) for name in ("without", "with")}
    runner.run([str(pythons["with"]), "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", str(core)])
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(STARTS):
        for name in random.sample(sorted(pythons), len(pythons)):
            started = time.perf_counter()
            # No PYTHONPATH: the loader that is measured is the installed one, not that of the source tree.
            runner.run([str(pythons[name]), "-c", "pass"], env={"LANG": "C.UTF-8"})
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Tenth percentile, median and ninetieth percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=10)
    return {
        name: round(value * 1e3, 3)
        for name, value in (("p10", cuts[0]), ("median", statistics.median(seconds)), ("p90", cuts[-1]))
    }
