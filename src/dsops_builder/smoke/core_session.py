"""Prove the core wheel: the same file in every environment of the matrix, without a compiler, trained with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from dsops_builder.errors import SmokeError
from dsops_builder.facts import find_interpreter
from dsops_builder.model import Environment, Matrix
from dsops_builder.pipeline import Workplace
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_builder.smoke import optimizers
from dsops_builder.smoke.environment import CleanEnvironment, Environments, Installation, find_core
from dsops_builder.smoke.judge import judge_run, judge_surroundings, train_in
from dsops_prebuilt._manifest import FILE_NAME, Manifest, file_sha256

LABEL = "portable"
# float32 after 5 steps at lr 1e-3 and 1e-2: rounding leaves 1e-6, other arithmetic 1e-3.
_TOLERANCE = 1e-5
# Before 0.19.8 the vector code of Lion takes the sign of its update from the wrong bits (csrc/includes/cpu_lion.h), and
# we ship what a release has: only its file is judged, not its result.
_SOUND_LION = Version("0.19.8")


def smoke_core(
    matrix: Matrix, cells: tuple[Environment, ...], place: Workplace, *, runner: Runner, report: Report
) -> None:
    """Train with the core wheel of ``place.dist`` in each environment of ``cells``.

    Raises :class:`SmokeError` with everything that was not as promised, after the last environment; FetchError and
    CommandError of the set-up.
    """
    wheel, failures = find_core(place.dist), list[str]()
    if wheel.name.endswith("-none-any.whl"):
        raise SmokeError(f"{wheel}: it has no portable tier; nox -s core makes the wheel of this machine")
    sha256 = file_sha256(wheel)
    report.say(f"{wheel.name}, sha256 {sha256}")
    session = _Session(matrix=matrix, place=place, runner=runner, report=report)
    chosen: dict[str, dict[str, str]] = {}
    for cell in cells:
        title = f"Python {cell.python}, torch {cell.torch}, DeepSpeed {cell.deepspeed}"
        chosen[cell.deepspeed], found = session.prove(cell, wheel, title)
        failures += [f"{title}: {failure}" for failure in found]
    failures += _differ(chosen)
    if file_sha256(wheel) != sha256:
        failures.append(f"{wheel} is not the file any longer that it was at the start")
    if failures:
        raise SmokeError("\n".join(("smoke-core", *failures)))


class _Session:
    """What every environment needs."""

    def __init__(self, matrix: Matrix, place: Workplace, runner: Runner, report: Report) -> None:
        self._matrix, self._place, self._runner, self._report = matrix, place, runner, report

    def prove(self, cell: Environment, wheel: Path, title: str) -> tuple[dict[str, str], list[str]]:
        """The file of each op that was chosen, and what was not as promised."""
        interpreter = find_interpreter(cell.python, self._place.variables)
        if interpreter is None:
            return {}, [f"no Python {cell.python} on this machine"]
        environments = Environments(matrix=self._matrix, place=self._place, runner=self._runner)
        what = Installation(
            interpreter=interpreter,
            torch=f"torch=={cell.torch}",
            deepspeed=f"deepspeed=={cell.deepspeed}",
            wheels=(wheel,),
            payload=LABEL,
        )
        with tempfile.TemporaryDirectory(prefix="dsops-smoke-") as scratch:
            with self._report.step(f"clean environment: {title}"):
                environment = environments.create(Path(scratch), what)
            with self._report.step(f"training: {title}"):
                facts = train_in(environment)
                failures = [*judge_run(facts, environment.payload), *judge_surroundings(environment, (), facts)]
                steps = _steps(environment)
                failures += judge_steps(steps, environment.payload, cell.deepspeed)
        files = {op: seen["file"].partition(f"/{LABEL}/")[2] for op, seen in steps.items()}
        self._report.say(f"  {facts['difference']:.1e} from torch.optim.AdamW; {', '.join(files.values())}")
        return files, failures


def _steps(environment: CleanEnvironment) -> dict[str, Any]:
    """What the optimizers reported, under the accelerator that has a builder for each of them in every release."""
    written = environment.folder / "optimizers.json"
    environment.run([optimizers.__file__, str(written)], DS_ACCELERATOR="cuda")
    report: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return report


def judge_steps(steps: Mapping[str, Any], payload: Path, deepspeed: str) -> Iterator[str]:
    """What of the optimizers' steps was not as promised: their file, the release it stands for, their result."""
    manifest = Manifest.from_json((payload / FILE_NAME).read_bytes(), FILE_NAME)
    releases = {
        str(payload / artifact.file): {release for source in artifact.sources for release in source.deepspeed}
        for artifact in manifest.artifacts
    }
    for op, seen in steps.items():
        if deepspeed not in releases.get(seen["file"], ()):
            yield f"{op} was loaded from {seen['file']}, which does not stand for DeepSpeed {deepspeed}"
        if not seen["difference"] <= _TOLERANCE and (op != "cpu_lion" or Version(deepspeed) >= _SOUND_LION):
            yield f"{op} differs from float64 by {seen['difference']}, more than {_TOLERANCE}"
        if not seen["openmp"]:
            yield f"{op} runs on one thread: torch's OpenMP runtime was not found"


def _differ(chosen: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """0.19.8 changed the arithmetic of two ops and not their signature: the releases must not share a file."""
    before, after = chosen.get("0.19.7", {}), chosen.get("0.19.8", {})
    for op in ("cpu_adagrad", "cpu_lion"):
        if op in before and op in after and before[op] == after[op] and "/x86_64/" not in after[op]:
            yield f"DeepSpeed 0.19.7 and 0.19.8 were both given {after[op]}"
