"""Measure what the loader costs: at a start of Python, side by side with a Python without it, and at the first load."""

from __future__ import annotations

import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dsops_builder.model import Matrix
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_builder.smoke.environment import Environments, find_wheels
from dsops_builder.venv import make_venv

_STARTS = 300
_LOADS = 15
_LOAD = """
import deepspeed, time
start = time.perf_counter()
deepspeed.ops.adam.cpu_adam.CPUAdamBuilder().load()
print("seconds", time.perf_counter() - start)
"""


def bench(matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report) -> None:
    """Print both measurements, in milliseconds, as JSON on stdout. The plan's wheels must lie in ``place.dist``."""
    target = plan.targets[0]
    with tempfile.TemporaryDirectory(prefix="dsops-bench-") as scratch:
        with report.step(f"{_STARTS} starts of Python, with and without the loader, interleaved"):
            core, _ = find_wheels(place.dist, plan.label, target.python)
            starts = _starts(plan.interpreter(target.python), core, Path(scratch), runner)
        with report.step(f"{_LOADS} first loads of cpu_adam, each in a process of its own"):
            folder = Path(scratch) / "environment"
            folder.mkdir()
            environments = Environments(matrix=matrix, plan=plan, place=place, runner=runner)
            environment = environments.create(folder, target.torch, target.python, target.deepspeed)
            printed = [environment.run(["-c", _LOAD]) for _ in range(_LOADS)]
            loads = [float(text.rpartition("seconds ")[2]) for text in printed]
    without, with_loader = (statistics.median(starts[name]) for name in ("without", "with"))
    result = {
        "machine": _processor(),
        "python": target.python,
        "start_without_ms": _spread(starts["without"]),
        "start_with_ms": _spread(starts["with"]),
        "start_difference_ms": round((with_loader - without) * 1e3, 3),
        "start_ratio": round(with_loader / without, 3),
        "load_ms": _spread(loads),
    }
    report.data(json.dumps(result, indent=1))


def _starts(interpreter: Path, core: Path, folder: Path, runner: Runner) -> dict[str, list[float]]:
    """Seconds of ``python -c pass`` in two environments that differ in the loader's wheel alone, in random order."""
    pythons = {name: make_venv(folder / name, interpreter, runner) for name in ("without", "with")}
    runner.run([str(pythons["with"]), "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", str(core)])
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(_STARTS):
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


def _processor() -> str:
    """The processor's name from /proc/cpuinfo and the number of its cores that the system shows."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"
