"""Install a row's wheels as a user would, on a machine without a compiler, and hold the run against what was promised."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from dsops_builder.errors import CommandError, SmokeError
from dsops_builder.fetch import fresh_folder
from dsops_builder.model import Matrix, TorchOrigin
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_builder.smoke import train
from dsops_builder.smoke.trace import compilers, executed
from dsops_prebuilt import __version__
from dsops_prebuilt._errors import NoArtifactError

# float32 after 20 steps at lr 1e-2: two correct optimizers that round differently stay below 1e-5, one that skips or
# repeats a step is 1e-2 off.
_TOLERANCE = 1e-4
_KEYS = """
import dsops_prebuilt
print(*(item.key for verdict in dsops_prebuilt.explain("{op}", "cuda").verdicts for item in verdict.rejections))
"""
_LOAD = "import deepspeed; print(deepspeed.ops.adam.cpu_adam.CPUAdamBuilder().load().__file__)"


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanEnvironment:
    """A virtual environment that a user could have, on a PATH without a single program."""

    folder: Path
    python: Path
    payloads: Path
    strace: tuple[str, ...]
    runner: Runner

    def run(self, words: Iterable[str], **variables: str) -> str:
        """Run the environment's Python. Raises :class:`CommandError` when it fails."""
        return self.runner.run([str(self.python), *words], cwd=self.folder, env=self._variables(variables))

    def traced(self, words: Iterable[str], log: Path, **variables: str) -> str:
        """Run the environment's Python under strace, which writes every execve of it and its children to ``log``."""
        command = [*self.strace, "-f", "--seccomp-bpf", "-e", "trace=execve,execveat", "-o", str(log)]
        return self.runner.run(
            [*command, str(self.python), *words], cwd=self.folder, env=self._variables(variables)
        )

    def _variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        defaults = {
            "PATH": str(self.folder / "no-programs"),
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "DS_ACCELERATOR": "cpu",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            # Port 0 is not for a rendezvous; one rank needs a store of its own and no fixed port.
            "MASTER_PORT": "29531",
        }
        return {**defaults, **variables}


def smoke_row(matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report) -> None:
    """Prove the wheels of ``plan`` that lie in ``place.dist``.

    Raises :class:`SmokeError` with everything that was not as promised; FetchError and CommandError of the set-up.
    """
    for torch, python in dict.fromkeys((target.torch, target.python) for target in plan.targets):
        wheels = find_wheels(place.dist, plan.label, python)
        releases = {target.deepspeed for target in plan.targets if (target.torch, target.python) == (torch, python)}
        for deepspeed in sorted(releases):
            title = f"torch {torch}, Python {python}, DeepSpeed {deepspeed}"
            with tempfile.TemporaryDirectory(prefix="dsops-smoke-") as scratch:
                with report.step(f"clean environment: {title}"):
                    requirements = [plan.torch_origin(torch).requirement, f"deepspeed=={deepspeed}", *map(str, wheels)]
                    environment = _create(
                        Path(scratch), plan.interpreter(python), requirements, plan.torch_origin(torch), matrix, place, runner
                    )
                with report.step(f"training: {title}"):
                    facts = _train(environment)
                    failures = [*judge_run(facts, environment.payloads / plan.label), *_around(environment, plan, facts)]
            if failures:
                raise SmokeError("\n".join((f"smoke-{plan.row}: {title}", *failures)))
            report.say(f"  loaded {facts['op_file'].rpartition('site-packages/')[2]} in {facts['load_seconds'] * 1e3:.1f} ms")
            report.say(f"  {len(facts['losses'])} steps, largest difference from torch.optim.AdamW {facts['difference']:.1e}")
            report.say(f"  programs started: {', '.join(sorted(set(facts['programs'])))}")


def find_wheels(dist: Path, label: str, python: str) -> tuple[Path, Path]:
    """The loader's wheel and the payload of a label and a Python in ``dist``. Raises :class:`SmokeError` for neither."""
    tag = "cp" + python.replace(".", "")
    core = payload = None
    for path in sorted(dist.glob("dsops_prebuilt*.whl")):
        name, version, _, tags = parse_wheel_filename(path.name)
        if str(version) == __version__ and name == "dsops-prebuilt":
            core = path
        if str(version) == __version__ and name == f"dsops-prebuilt-{label}" and tag in {one.interpreter for one in tags}:
            payload = path
    if core is None or payload is None:
        raise SmokeError(
            f"{dist}: no wheel of {'the loader' if core is None else f'dsops-prebuilt-{label} for {tag}'} {__version__}"
        )
    return core, payload


def _create(
    folder: Path,
    interpreter: Path,
    requirements: list[str],
    origin: TorchOrigin,
    matrix: Matrix,
    place: Workplace,
    runner: Runner,
) -> CleanEnvironment:
    for name in ("no-programs", "home"):
        (folder / name).mkdir()
    make = [sys.executable, "-m", "virtualenv", "--quiet", "--no-periodic-update", "--python", str(interpreter)]
    runner.run([*make, str(folder / "venv")])
    python = folder / "venv/bin/python"
    index = [] if origin.index is None else ["--extra-index-url", origin.index]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *index]
    runner.run([*pip, *requirements], env=dict(place.variables))
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    return CleanEnvironment(
        folder=folder,
        python=python,
        payloads=site / "dsops_prebuilt_payloads",
        strace=_strace(matrix, place, runner),
        runner=runner,
    )


def _strace(matrix: Matrix, place: Workplace, runner: Runner) -> tuple[str, ...]:
    """strace from pinned packages. Its libraries are named to the loader, so that no traced program sees them."""
    home = place.cache / "tracer" / matrix.tracer[0].sha256[:16]
    if not home.exists():
        with fresh_folder(home) as scratch:
            place.mirror(runner).unpack(matrix.tracer, scratch)
    libraries = ":".join(str(home / part) for part in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"))
    return ("/lib64/ld-linux-x86-64.so.2", "--library-path", libraries, str(home / "usr/bin/strace"))


def _train(environment: CleanEnvironment) -> dict[str, Any]:
    """Run the training script under strace and return what it reported, with the programs that ran."""
    written, log = environment.folder / "report.json", environment.folder / "strace.log"
    try:
        environment.traced([train.__file__, str(written)], log)
    except CommandError as error:
        tried = compilers(executed(log.read_text(encoding="utf-8"))) if log.exists() else ()
        asked = f"\nprograms asked for that compile: {', '.join(tried)}" if tried else ""
        raise SmokeError(f"training failed: {error}{asked}") from error
    facts: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return {**facts, "programs": tuple(executed(log.read_text(encoding="utf-8")))}


def judge_run(facts: Mapping[str, Any], payload: Path) -> Iterator[str]:
    """What of a training run was not as promised, a sentence each. ``payload`` is the folder the op must come from."""
    if not Path(facts["op_file"]).is_relative_to(payload):
        yield f"cpu_adam was loaded from {facts['op_file']}, not from {payload}"
    foreign = {op: file for op, file in facts["loaded"].items() if not Path(file).is_relative_to(payload)}
    if foreign:
        yield f"loaded from outside the payload: {foreign}"
    if facts["optimizer"] != "DeepSpeedCPUAdam":
        yield f"the optimizer was {facts['optimizer']}, not DeepSpeedCPUAdam"
    if not facts["difference"] <= _TOLERANCE:
        yield f"weights differ from torch.optim.AdamW by {facts['difference']}, more than {_TOLERANCE}"
    if not facts["losses"][-1] != facts["losses"][0]:
        yield "the loss did not change: nothing was trained"
    if facts["jit_calls"]:
        yield f"torch.utils.cpp_extension was asked to compile {', '.join(facts['jit_calls'])}"
    if not facts["programs"]:
        yield "strace saw no program at all, not even Python: the watch itself failed"
    found = compilers(facts["programs"])
    if found:
        yield f"a compiler was started or looked for: {', '.join(found)}"


def _around(environment: CleanEnvironment, plan: Plan, facts: Mapping[str, Any]) -> Iterator[str]:
    """What of the surroundings was not as promised: hostile machines, the report, the explanation."""
    fake = environment.folder / "fake-cuda"
    (fake / "bin").mkdir(parents=True)
    (fake / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.1, V12.1.105'\n", encoding="ascii")
    (fake / "bin/nvcc").chmod(0o755)
    # /proc takes no file from anybody, so it is read-only for root too.
    for name, variables in {"CUDA_HOME with nvcc 12.1": {"CUDA_HOME": str(fake)}, "read-only HOME": {"HOME": "/proc"}}.items():
        printed = environment.run(["-c", _LOAD], **variables)
        if facts["op_file"] not in printed:
            yield f"with {name}, cpu_adam came from elsewhere: {printed}"
    table = environment.run([str(environment.python.parent / "ds_report")])
    installed = [line for line in table.splitlines() if line.startswith("cpu_adam ")]
    if not installed or "[YES]" not in installed[0] or "[OKAY]" not in installed[0]:
        yield f"ds_report does not show cpu_adam as installed: {installed}"
    answer = json.loads(environment.run(["-m", "dsops_prebuilt", "explain", "cpu_adam", "--json"]))
    if answer["path"] != facts["op_file"]:
        yield f"dsops explain cpu_adam chose {answer['path']}, and {facts['op_file']} was loaded"
    for op in sorted({target.op.name for target in plan.targets if target.op.kernel == "cuda"}):
        yield from _must_refuse(environment, op)


def _must_refuse(environment: CleanEnvironment, op: str) -> Iterator[str]:
    """This machine cannot run the op's GPU code (torch of another label, or no GPU): the answer must name that key."""
    keys = set(environment.run(["-c", _KEYS.format(op=op)]).split())
    expected = "gpu" if keys == {"gpu"} else "cuda"
    if expected not in keys:
        yield f"dsops explain {op} --accelerator cuda rejects on {sorted(keys)}, and should on cuda or gpu"
    try:
        printed = environment.run(["-m", "dsops_prebuilt", "explain", op, "--accelerator", "cuda"])
    except CommandError as error:
        if error.code != NoArtifactError.exit_code:
            yield f"dsops explain {op} --accelerator cuda: {error}"
    else:
        yield f"dsops explain {op} --accelerator cuda accepted an artifact that cannot run here:\n{printed}"
