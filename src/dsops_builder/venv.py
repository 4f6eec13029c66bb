"""Make empty virtual environments."""

from __future__ import annotations

import sys
from pathlib import Path

from dsops_builder.process import Runner


def make_venv(folder: Path, interpreter: Path, runner: Runner) -> Path:
    """Make an environment of ``interpreter`` in ``folder`` and return its Python.

    virtualenv brings pip along, which Debian's interpreters lack (python3-venv is a package of its own).
    """
    quiet = ["--quiet", "--no-periodic-update"]
    runner.run([sys.executable, "-m", "virtualenv", *quiet, "--python", str(interpreter), str(folder)])
    return folder / "bin/python"
