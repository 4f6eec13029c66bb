"""The project's files agree with one another."""

from __future__ import annotations

import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from dsops_builder.core import check_loader
from dsops_builder.errors import GateError
from dsops_builder.matrix import load_matrix
from dsops_builder.model import split_row_id
from dsops_builder.ops import load_ops
from dsops_prebuilt import __version__
from dsops_prebuilt._catalogue import CPU_OPTIMIZERS, PAYLOADS, PLATFORMS, Payload

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MATRIX = load_matrix(ROOT / "build_matrix.yaml")
OPS = {op.id: op for op in load_ops(ROOT / "ops")}


def test_the_loader_has_no_dependencies() -> None:
    assert "dependencies" not in PROJECT


def test_every_label_has_an_extra_that_pins_its_payload() -> None:
    labels = {split_row_id(row)[1] for row in MATRIX.rows}
    assert PROJECT["optional-dependencies"] == {
        label: [f"dsops-prebuilt-{label}=={__version__}"] for label in sorted(labels)
    }


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_calls_the_readmes_test_command() -> None:
    command = next(line for line in README.splitlines() if line.endswith("nox -s tests"))
    assert command in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row_id", MATRIX.rows)
def test_the_readmes_table_is_the_matrix(row_id: str) -> None:
    row = MATRIX.rows[row_id]
    label = split_row_id(row_id)[1]
    (line,) = [line for line in README.splitlines() if line.startswith(f"| `dsops-prebuilt-{label}` |")]
    _, _, torch, python, ops, deepspeed, _ = (cell.strip() for cell in line.split("|"))
    assert torch == ", ".join(pairing.torch.rpartition(".")[0] for pairing in row.pairings)
    assert python == ", ".join(dict.fromkeys(each for pairing in row.pairings for each in pairing.pythons))
    assert deepspeed == ", ".join(row.deepspeed)
    for word in (*(f"`{op}`" for op in row.ops), *(f"{a.major}.{a.minor}" for p in row.pairings for a in p.archs)):
        assert word in ops


def write(path: Path, names: set[str]) -> Path:
    with ZipFile(path, "w") as archive:
        for name in sorted(names):
            archive.writestr(name, "")
    return path


@pytest.fixture
def loader() -> set[str]:
    """The files of the loader's wheel."""
    src = ROOT / "src"
    names = {path.relative_to(src).as_posix() for path in (src / "dsops_prebuilt").rglob("*.py")}
    names |= {f"dsops_prebuilt_activate.{suffix}" for suffix in ("py", "pth", "start")}
    return names | {"dsops_prebuilt/py.typed", f"dsops_prebuilt-{__version__}.dist-info/METADATA"}


def test_a_whole_loader_passes(tmp_path: Path, loader: set[str]) -> None:
    check_loader(write(tmp_path / "a.whl", loader), ROOT / "src")


def test_a_loader_without_its_pth_file_is_refused(tmp_path: Path, loader: set[str]) -> None:
    wheel = write(tmp_path / "a.whl", loader - {"dsops_prebuilt_activate.pth"})
    with pytest.raises(GateError, match=r"lacks \['dsops_prebuilt_activate.pth'\], and holds nothing beside"):
        check_loader(wheel, ROOT / "src")


def test_a_loader_with_the_builder_in_it_is_refused(tmp_path: Path, loader: set[str]) -> None:
    wheel = write(tmp_path / "a.whl", loader | {"dsops_builder/cli.py"})
    with pytest.raises(GateError, match=r"lacks nothing, and holds \['dsops_builder/cli.py'\] beside the loader"):
        check_loader(wheel, ROOT / "src")


def test_the_loaders_catalogue_is_the_matrix() -> None:
    assert {payload.label: payload for payload in PAYLOADS} == {
        split_row_id(row_id)[1]: Payload(
            label=split_row_id(row_id)[1],
            torch=tuple(pairing.torch.rpartition(".")[0] for pairing in row.pairings),
            python=tuple(
                dict.fromkeys("cp" + each.replace(".", "") for pairing in row.pairings for each in pairing.pythons)
            ),
            ops={OPS[op].name: OPS[op].accelerators for op in row.ops},
        )
        for row_id, row in MATRIX.rows.items()
    }


def test_the_loaders_catalogue_has_the_portable_tier_of_the_matrix() -> None:
    assert {OPS[op].name: OPS[op].accelerators for op in MATRIX.portable.ops} == CPU_OPTIMIZERS
    assert set(PLATFORMS) == {level.machine for level in MATRIX.portable.simd}
