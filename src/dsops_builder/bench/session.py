"""Run every measurement with a row's wheels in a clean environment, and write them as one JSON value."""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path

from dsops_builder.bench import kernels
from dsops_builder.bench.loader import LOADS, STARTS, measure_loads, measure_starts
from dsops_builder.model import Matrix
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_builder.smoke.environment import Environments, find_core, of_row


def bench(matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report) -> None:
    """Measure, and write ``bench.json`` beside the wheels, which are the plan's and the core's."""
    target = plan.targets[0]
    with tempfile.TemporaryDirectory(prefix="dsops-bench-") as scratch:
        with report.step(f"{STARTS} starts of Python, with and without the loader, interleaved"):
            core = find_core(place.dist)
            starts = measure_starts(plan.interpreter(target.python), core, Path(scratch), runner)
        with report.step("clean environment"):
            folder = Path(scratch) / "environment"
            folder.mkdir()
            environments = Environments(matrix=matrix, place=place, runner=runner)
            what = of_row(plan, place.dist, target.torch, target.python, target.deepspeed)
            environment = environments.create(folder, what)
        with report.step(f"{LOADS} first loads of cpu_adam for each tier, each in a process of its own"):
            loads = {tier: measure_loads(environment, {"DSOPS_TIER": tier}) for tier in ("stock", "portable")}
        with report.step("steps of cpu_adam: stock, portable and torch, interleaved on the same tensors"):
            written = folder / "kernels.json"
            environment.run([kernels.__file__, str(written)])
            steps = json.loads(written.read_text(encoding="utf-8"))
        for line in kernels.table(steps["rows"]):
            report.say(line)
    result = {
        "machine": _processor(),
        "python": target.python,
        "torch": target.torch,
        **starts,
        "load_ms": loads,
        "adam": steps,
    }
    written = place.dist / "bench.json"
    written.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report.data(str(written))


def _processor() -> str:
    """The processor's name from /proc/cpuinfo and the number of its cores that the system shows."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"
