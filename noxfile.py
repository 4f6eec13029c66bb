# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2026.10.20", "ruamel.yaml==0.19.1"]
#
# [tool.nox]
# script-venv-backend = "virtualenv"
# ///
"""Sessions over ``python -m dsops_builder``. Every row of build_matrix.yaml has ``build-ROW`` and ``smoke-ROW``."""

from __future__ import annotations

from pathlib import Path

import nox
from nox.logger import logger
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "virtualenv"  # reads pip's configuration, as the builder does; uv is not needed
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests"]

GROUPS = nox.project.load_toml("pyproject.toml")
SOURCES = {"PYTHONPATH": "src"}


def row_ids() -> list[str]:
    """Ids of the matrix's rows. None for a file that is not one: `nox -s plan` is still there to list its faults."""
    try:
        return list(YAML(typ="safe", pure=True).load(Path("build_matrix.yaml"))["rows"])
    except (OSError, YAMLError, LookupError, TypeError):
        logger.warning("build_matrix.yaml has faults, so its rows have no sessions; `nox -s plan` lists the faults")
        return []


def install(session: nox.Session, *groups: str) -> None:
    """Install dependency groups of pyproject.toml."""
    session.install("--quiet", *nox.project.dependency_groups(GROUPS, *groups))


def builder(session: nox.Session, *words: str) -> None:
    """Run one command of the builder, with what was given after ``--``."""
    install(session, "builder")
    session.run("python", "-m", "dsops_builder", *words, *session.posargs, env=SOURCES)


def build(session: nox.Session) -> None:
    """Build the row's wheels into dist/: -- --torch 2.7.1 --python 3.11 narrows it."""
    builder(session, "build", session.name.removeprefix("build-"))


def smoke(session: nox.Session) -> None:
    """Train with the row's wheels (or, for core, the loader's), in a clean environment: 20 steps under strace."""
    builder(session, "smoke", session.name.removeprefix("smoke-"))


for row in row_ids():
    nox.session(name=f"build-{row}")(build)
    nox.session(name=f"smoke-{row}")(smoke)
nox.session(name="smoke-core")(smoke)


@nox.session
def core(session: nox.Session) -> None:
    """Build the loader's wheels into dist/: alone, and with the portable tier."""
    builder(session, "core")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what the loader costs, and a step of Adam by tier, into dist/bench.json."""
    builder(session, "bench", "1_cpu")


@nox.session
def plan(session: nox.Session) -> None:
    """Print what would be built: -- 1_cu118 for one row, -- --json for GitHub Actions."""
    builder(session, "plan")


@nox.session
def tests(session: nox.Session) -> None:
    """Run pytest over tests/, or over what is given after --."""
    install(session, "builder", "test", "torch")
    session.run("pytest", *(session.posargs or ["tests"]), env=SOURCES)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff: its rules, then its format."""
    install(session, "lint")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Run mypy, strict, over src, tests and this file."""
    install(session, "typecheck")
    session.run("mypy", *(session.posargs or ["src", "tests", "noxfile.py"]))
