"""Open an op's module by its file, stock or portable, in this process or in one of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

from dsops_prebuilt.portable import TIER

SRC = Path(__file__).parents[2] / "src"


def open_portable(path: Path) -> ModuleType:
    """The module of a portable library."""
    artifact = SimpleNamespace(module=f"portable.{path.stem}", op=path.stem, simd="any")
    return TIER.open(artifact, path)  # type: ignore[arg-type]


def open_any(path: Path) -> ModuleType:
    """The module of a stock extension or of a portable library, by what the file exports."""
    found = re.search(rb"PyInit_(\w+)", path.read_bytes())
    if found is None:
        return open_portable(path)
    name = found[1].decode()
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run_script(
    script: str, *arguments: str, variables: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, whose exit code is the caller's to look at."""
    environment = {**_inherited(os.environ), **(variables or {}), "PYTHONPATH": f"{SRC}:{Path(__file__).parents[2]}"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=timeout,
    )


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("OMP_", "LD_", "PYTHON"))}
