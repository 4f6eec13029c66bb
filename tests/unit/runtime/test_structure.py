from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.runtime.fakes import SRC

from dsops_prebuilt import DsopsError, _errors

PACKAGE = SRC / "dsops_prebuilt"
ACTIVATE = SRC / "dsops_prebuilt_activate.py"
MODULES = {
    path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".").replace(".__init__", ""): path
    for path in sorted([*PACKAGE.rglob("*.py"), ACTIVATE])
}
# Each may import those before it; the command line and the subpackages come last.
ORDER = [
    "_errors",
    "_variant",
    "_manifest",
    "_notice",
    "_unfinished",
    "_nvml",
    "_host",
    "_select",
    "_load",
    "_catalogue",
    "_remedy",
    "_explain",
    "_report",
    "_deepspeed",
]
CORE = ["dsops_prebuilt_activate", *(f"dsops_prebuilt.{name}" for name in ("_host", "_select", "_load", "_deepspeed"))]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), feature_version=(3, 9))


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_the_runtime_never_imports_the_builder(name: str) -> None:
    assert not {item for item in imports_of(MODULES[name]) if item.split(".")[0] == "dsops_builder"}


@pytest.mark.parametrize("name", ORDER)
def test_data_flows_one_way(name: str) -> None:
    later = {f"dsops_prebuilt.{item}" for item in [*ORDER[ORDER.index(name) :], "cli", "portable", "reference"]}
    assert not later & imports_of(PACKAGE / f"{name}.py")


def test_every_module_has_a_place_in_the_order() -> None:
    private = {path.stem for path in PACKAGE.glob("_*.py")} - {"__init__", "__main__"}
    assert private == set(ORDER)


MACHINE = {
    "platform",
    "sysconfig",
    "shutil",
    "subprocess",
    "ctypes",
    "socket",
    "multiprocessing",
    "tempfile",
    "distutils",
}


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[-1] not in ("_host", "_nvml")])
def test_only_the_host_asks_the_machine(name: str) -> None:
    calls_c = {"ctypes"} if name.startswith("dsops_prebuilt.portable") else set()
    assert not (MACHINE - calls_c) & {item.split(".")[0] for item in imports_of(MODULES[name])}
    text = MODULES[name].read_text()
    assert (re.search(r"\benviron\b", text) is not None) is (
        name == "dsops_prebuilt_activate"
    )  # DSOPS_DISABLE, before anything else is imported
    assert "getenv" not in text


def test_no_module_starts_a_process_or_writes_a_file() -> None:
    words = ("subprocess", "os.system", "Popen", "write_text", "write_bytes", "makedirs", "mkdir")
    offenders = [(name, word) for name, path in MODULES.items() for word in words if word in path.read_text()]
    assert offenders == []


@pytest.mark.parametrize("name", MODULES)
def test_modules_parse_as_python_3_9_and_stay_small(name: str) -> None:
    tree, text = tree_of(MODULES[name]), MODULES[name].read_text()
    assert len(text.splitlines()) <= 350
    assert ast.get_docstring(tree)
    long = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 50
    ]
    assert long == []


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    docstrings = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in docstrings)


def test_activation_host_selection_and_loading_fit_in_700_lines() -> None:
    """The seam to DeepSpeed included; prose is not counted, so that it is never what is saved on.

    ``_nvml`` is imported only for a CUDA op or an explanation, ``_explain`` and ``_remedy`` only for an explanation or
    a miss, ``_notice`` when there is something to say, ``_report`` and ``_unfinished`` for DeepSpeed's report and errors.
    """
    assert sum(code_lines(MODULES[name]) for name in CORE) <= 700


def test_importing_the_package_imports_the_standard_library_only() -> None:
    script = """
import sys
before = set(sys.modules)
import dsops_prebuilt
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded - set(sys.stdlib_module_names) - {"dsops_prebuilt"}))
print(sorted(name for name in sys.modules if name.startswith("dsops_prebuilt.")))
"""
    if not hasattr(sys, "stdlib_module_names"):
        pytest.skip("sys.stdlib_module_names is of 3.10")
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(SRC)!r})\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n[]\n"


def test_torch_and_deepspeed_are_imported_by_name_only_where_they_are_needed() -> None:
    for name, path in MODULES.items():
        assert not {item for item in imports_of(path) if item.split(".")[0] in ("torch", "deepspeed", "op_builder")}, (
            name
        )


def test_exit_codes_are_unique() -> None:
    classes = [kind for kind in vars(_errors).values() if isinstance(kind, type) and issubclass(kind, DsopsError)]
    codes = [kind.exit_code for kind in classes]
    assert len(classes) == 6
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
