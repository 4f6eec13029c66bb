"""Make the environment of a user: wheels from pip, a PATH without a single program, and a watch on every process."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from dsops_builder.cache import fresh_folder
from dsops_builder.errors import SmokeError
from dsops_builder.model import Matrix
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.venv import make_venv
from dsops_prebuilt import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanEnvironment:
    """A virtual environment that a user could have, on a PATH without a single program.

    ``payload`` is the folder of the row's payload in its site-packages.
    """

    folder: Path
    python: Path
    payload: Path
    strace: tuple[str, ...]
    runner: Runner

    def run(self, words: Iterable[str], **variables: str) -> str:
        """Run the environment's Python. Raises :class:`CommandError` when it fails."""
        return self.runner.run([str(self.python), *words], cwd=self.folder, env=self._variables(variables))

    def traced(self, words: Iterable[str], log: Path, **variables: str) -> str:
        """Run the environment's Python under strace, which writes every execve of it and its children to ``log``."""
        command = [*self.strace, "-f", "--seccomp-bpf", "-e", "trace=execve,execveat", "-o", str(log)]
        return self.runner.run([*command, str(self.python), *words], cwd=self.folder, env=self._variables(variables))

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
            "MASTER_PORT": str(_free_port()),
        }
        return {**defaults, **variables}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environments:
    """Makes clean environments for the wheels of a plan that lie in ``place.dist``."""

    matrix: Matrix
    plan: Plan
    place: Workplace
    runner: Runner

    def create(self, folder: Path, torch: str, python: str, deepspeed: str) -> CleanEnvironment:
        """Install torch, DeepSpeed and our wheels into an environment below ``folder``, which must be empty.

        Raises :class:`SmokeError` when a wheel is not in ``dist``, FetchError and CommandError of the set-up.
        """
        wheels = find_wheels(self.place.dist, self.plan.label, python)
        for name in ("no-programs", "home"):
            (folder / name).mkdir()
        executable = make_venv(folder / "venv", self.plan.interpreter(python), self.runner)
        origin = self.plan.torch_origin(torch)
        index = [] if origin.index is None else ["--extra-index-url", origin.index]
        pip = [str(executable), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *index]
        requirements = [origin.requirement, f"deepspeed=={deepspeed}", *map(str, wheels)]
        self.runner.run([*pip, *requirements], env=self.place.variables)
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        return CleanEnvironment(
            folder=folder,
            python=executable,
            payload=site / "dsops_prebuilt_payloads" / self.plan.label,
            strace=self._strace(),
            runner=self.runner,
        )

    def _strace(self) -> tuple[str, ...]:
        """The command of strace, unpacked; the loader is told its libraries, so that no traced program sees them."""
        tracer = self.matrix.tracer
        home = self.place.cache / "tracer" / tracer[0].sha256[:16]
        if not home.exists():
            with fresh_folder(home) as scratch:
                self.place.mirror(self.runner).unpack(tracer, scratch)
        libraries = ":".join(str(home / part) for part in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"))
        return ("/lib64/ld-linux-x86-64.so.2", "--library-path", libraries, str(home / "usr/bin/strace"))


def find_wheels(dist: Path, label: str, python: str) -> tuple[Path, Path]:
    """The loader's wheel, and the payload of a label and a Python. Raises :class:`SmokeError` for one not there."""
    core, payload = _newest(dist, "dsops-prebuilt", "py3"), _payload(dist, label, python)
    if core is None or payload is None:
        missing = "the loader" if core is None else f"dsops-prebuilt-{label} for Python {python}"
        raise SmokeError(f"{dist}: no wheel of {missing} {__version__}; nox -s core build-ROW makes them")
    return core, payload


def has_payload(dist: Path, label: str, python: str) -> bool:
    """Whether ``dist`` has the payload of a label and a Python, of this version."""
    return _payload(dist, label, python) is not None


def _payload(dist: Path, label: str, python: str) -> Path | None:
    return _newest(dist, f"dsops-prebuilt-{label}", "cp" + python.replace(".", ""))


def _newest(dist: Path, distribution: str, interpreter: str) -> Path | None:
    """The wheel of a distribution with the highest build number (Binary distribution format, "build tag")."""
    found = []
    for path in dist.glob("dsops_prebuilt*.whl"):
        name, version, build, tags = parse_wheel_filename(path.name)
        here = name == distribution and str(version) == __version__
        if here and interpreter in {tag.interpreter for tag in tags}:
            found.append((build, path))
    return max(found, default=(None, None))[1]


def _free_port() -> int:
    """A TCP port that nothing listens on, for the rendezvous of one rank with itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
