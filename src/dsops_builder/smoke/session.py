"""Prove a row's wheels: install them as a user would, on a machine without a compiler, and train."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dsops_builder.errors import SmokeError
from dsops_builder.model import Matrix
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_builder.smoke.environment import Environments, of_row
from dsops_builder.smoke.judge import judge_run, judge_surroundings, train_in


def smoke_row(matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report) -> None:
    """Prove the wheels of ``plan`` that lie in ``place.dist``.

    Raises :class:`SmokeError` with everything that was not as promised; FetchError and CommandError of the set-up.
    """
    environments = Environments(matrix=matrix, place=place, runner=runner)
    cuda_ops = sorted({target.op.name for target in plan.targets if target.op.kernel == "cuda"})
    cells = dict.fromkeys((target.torch, target.python, target.deepspeed) for target in plan.targets)
    for torch, python, deepspeed in cells:
        title = f"torch {torch}, Python {python}, DeepSpeed {deepspeed}"
        with tempfile.TemporaryDirectory(prefix="dsops-smoke-") as scratch:
            with report.step(f"clean environment: {title}"):
                environment = environments.create(Path(scratch), of_row(plan, place.dist, torch, python, deepspeed))
            with report.step(f"training: {title}"):
                facts = train_in(environment)
                failures = [*judge_run(facts, environment.payload), *judge_surroundings(environment, cuda_ops, facts)]
        if failures:
            raise SmokeError("\n".join((f"smoke-{plan.row}: {title}", *failures)))
        milliseconds = facts["load_seconds"] * 1e3
        report.say(f"  loaded {facts['op_file'].rpartition('site-packages/')[2]} in {milliseconds:.1f} ms")
        report.say(
            f"  {len(facts['losses'])} steps; largest difference from torch.optim.AdamW {facts['difference']:.1e}"
        )
        report.say(f"  programs asked for: {', '.join(sorted(set(facts['programs'])))}")
