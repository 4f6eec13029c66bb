"""Make the environment of a user: wheels from pip, a PATH without a compiler, and a watch on every process."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, sys_tags
from packaging.utils import BuildTag, parse_wheel_filename

from dsops_builder.cache import fresh_folder
from dsops_builder.errors import SmokeError
from dsops_builder.model import Matrix
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.venv import make_venv
from dsops_prebuilt import __version__

PROGRAMS = ("df",)
"""What DeepSpeed itself cannot be imported without, where triton is installed: it asks ``df`` for the kind of its
cache's file system (ops/transformer/inference/triton/matmul_ext.py, 0.14.4 to 0.19.8)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanEnvironment:
    """A virtual environment that a user could have, on a PATH with nothing but :data:`PROGRAMS`.

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
            "PATH": str(self.folder / "programs"),
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
class Installation:
    """What a user installs into an environment of ``interpreter``: ``torch`` and ``deepspeed``, and wheels of ours.

    ``index`` is one more index for torch, or None; ``payload`` is the label whose folder the ops must come from.
    """

    interpreter: Path
    torch: str
    deepspeed: str
    wheels: tuple[Path, ...]
    payload: str
    index: str | None = None


def of_row(plan: Plan, dist: Path, torch: str, python: str, deepspeed: str) -> Installation:
    """The core wheel and the payload of a row. Raises :class:`SmokeError` when one is not in ``dist``."""
    origin = plan.torch_origin(torch)
    return Installation(
        interpreter=plan.interpreter(python),
        torch=origin.requirement,
        deepspeed=f"deepspeed=={deepspeed}",
        wheels=find_wheels(dist, plan.label, python),
        payload=plan.label,
        index=origin.index,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Environments:
    """Makes clean environments, with strace beside them."""

    matrix: Matrix
    place: Workplace
    runner: Runner

    def create(self, folder: Path, what: Installation) -> CleanEnvironment:
        """Install into an environment below ``folder``, which must be empty.

        Raises FetchError and CommandError of the set-up.
        """
        for name in ("programs", "home"):
            (folder / name).mkdir()
        for program in PROGRAMS:
            found = shutil.which(program)
            if found is not None:
                (folder / "programs" / program).symlink_to(found)
        executable = make_venv(folder / "venv", what.interpreter, self.runner)
        index = [] if what.index is None else ["--extra-index-url", what.index]
        pip = [str(executable), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *index]
        self.runner.run([*pip, what.torch, what.deepspeed, *map(str, what.wheels)], env=self.place.variables)
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        return CleanEnvironment(
            folder=folder,
            python=executable,
            payload=site / "dsops_prebuilt_payloads" / what.payload,
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


def find_core(dist: Path) -> Path:
    """The wheel of the loader that pip would choose here. Raises :class:`SmokeError` when there is none."""
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    found = [
        (min(ranks[tag] for tag in tags & ranks.keys()), path)
        for path, name, _, tags in _ours(dist)
        if name == "dsops-prebuilt" and tags & ranks.keys()
    ]
    if not found:
        raise SmokeError(f"{dist}: no wheel of the loader {__version__}; nox -s core makes it")
    return min(found)[1]


def find_wheels(dist: Path, label: str, python: str) -> tuple[Path, Path]:
    """The loader's wheel, and the payload of a label and a Python. Raises :class:`SmokeError` for one not there."""
    payload = _payload(dist, label, python)
    if payload is None:
        missing = f"dsops-prebuilt-{label} for Python {python}"
        raise SmokeError(f"{dist}: no wheel of {missing} {__version__}; nox -s build-ROW makes it")
    return find_core(dist), payload


def has_payload(dist: Path, label: str, python: str) -> bool:
    """Whether ``dist`` has the payload of a label and a Python, of this version."""
    return _payload(dist, label, python) is not None


def _payload(dist: Path, label: str, python: str) -> Path | None:
    """The payload with the highest build number (Binary distribution format, "build tag")."""
    interpreter = "cp" + python.replace(".", "")
    found = [
        (build, path)
        for path, name, build, tags in _ours(dist)
        if name == f"dsops-prebuilt-{label}" and interpreter in {tag.interpreter for tag in tags}
    ]
    return max(found, default=(None, None))[1]


def _ours(dist: Path) -> Iterator[tuple[Path, str, BuildTag, frozenset[Tag]]]:
    """Path, distribution, build and tags of each wheel of this version."""
    for path in dist.glob("dsops_prebuilt*.whl"):
        name, version, build, tags = parse_wheel_filename(path.name)
        if str(version) == __version__:
            yield path, name, build, tags


def _free_port() -> int:
    """A TCP port that nothing listens on, for the rendezvous of one rank with itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
