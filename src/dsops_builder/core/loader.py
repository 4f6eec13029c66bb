"""Build the loader's wheel, pure Python, from a copy of the project, and see that it holds the loader and no more."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

from dsops_builder.errors import GateError
from dsops_builder.pipeline import Workplace
from dsops_builder.process import Runner
from dsops_prebuilt import __version__

_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
# 1980-01-01, the first date that a zip archive can hold; setuptools puts it on every member.
_EPOCH = "315532800"


def build_loader(root: Path, folder: Path, place: Workplace, runner: Runner) -> Path:
    """Build ``dsops_prebuilt-VERSION-py3-none-any.whl`` of the project at ``root`` into ``folder``, which is empty.

    Raises :class:`GateError` when the wheel lacks a file of the loader or holds anything else, and
    :class:`~dsops_builder.errors.CommandError` when setuptools fails.
    """
    copy = folder / "project"
    copy.mkdir()
    # A build in the tree itself would take files from an older run's build/ folder into the wheel.
    for name in _SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copyfile(root / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    variables = {**place.variables, "SOURCE_DATE_EPOCH": _EPOCH}
    runner.run([*pip, "--wheel-dir", str(folder), str(copy)], env=variables)
    built = folder / f"dsops_prebuilt-{__version__}-py3-none-any.whl"
    check_loader(built, root / "src")
    return built


def check_loader(wheel: Path, src: Path) -> None:
    """Raise :class:`GateError` unless ``wheel`` holds the loader's files, its metadata, and no others."""
    package = [*(src / "dsops_prebuilt").rglob("*.py"), src / "dsops_prebuilt/py.typed"]
    wanted = {path.relative_to(src).as_posix() for path in package}
    wanted |= {path.name for path in src.glob("dsops_prebuilt_activate.*")}
    with ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    if found != wanted:
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        raise GateError(f"{wheel.name}: lacks {missing or 'nothing'}, and holds {extra or 'nothing'} beside the loader")
