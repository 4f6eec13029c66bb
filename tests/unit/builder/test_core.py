"""The wheels of dsops-prebuilt itself: the loader from a copy of the project, and one machine's with the portable tier."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from wheel.wheelfile import WheelFile

from dsops_builder.core import platform_wheel
from dsops_builder.core.loader import build_loader
from dsops_builder.core.platform_wheel import Contents
from dsops_builder.errors import GateError
from dsops_builder.pipeline import Workplace
from dsops_builder.portable import PortableArtifact
from dsops_builder.wheel import write_wheel
from dsops_prebuilt import __version__
from dsops_prebuilt._manifest import Artifact, Manifest, SourceDigest
from dsops_prebuilt._variant import Simd

PortableSample = Callable[..., PortableArtifact]
_RAW = f"dsops_prebuilt-{__version__}-py3-none-linux_x86_64.whl"
_REPAIRED = f"dsops_prebuilt-{__version__}-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
_INFO = f"dsops_prebuilt-{__version__}.dist-info"
_ROOT = "dsops_prebuilt_payloads/portable"
_FILE = "sample/ds0.19.8/x86_64/sample_op.scalar.so"


@pytest.fixture
def contents(loader_wheel: Path, portable_sample: PortableSample) -> Contents:
    return Contents(
        loader=loader_wheel,
        artifacts=(portable_sample(),),
        license_text="DeepSpeed's licence\n",
        provenance=(("host_compiler", "gcc-10 10.2.1"),),
    )


def _seal(contents: Contents, folder: Path) -> Path:
    """Seal a raw wheel under the name that auditwheel would give it."""
    raw = platform_wheel.pack(contents, folder / "raw")
    return platform_wheel.seal(raw.rename(raw.with_name(_REPAIRED)), contents, folder / "dist")


def test_the_raw_wheel_is_the_loader_and_the_artifacts(
    contents: Contents, loader_members: dict[str, bytes], tmp_path: Path
) -> None:
    path = platform_wheel.pack(contents, tmp_path / "raw")
    assert path.name == _RAW
    with WheelFile(path) as wheel:
        # WheelFile compares what it reads with RECORD.
        found = {name: wheel.read(name) for name in wheel.namelist()}
    changed = {f"{_INFO}/METADATA", f"{_INFO}/WHEEL"}
    assert {name: found[name] for name in loader_members.keys() - changed} == {
        name: content for name, content in loader_members.items() if name not in changed
    }
    assert found.keys() - loader_members.keys() == {
        f"{_ROOT}/{_FILE}",
        f"{_INFO}/licenses/LICENSE.deepspeed",
        f"{_INFO}/RECORD",
    }
    assert found[f"{_INFO}/licenses/LICENSE.deepspeed"] == b"DeepSpeed's licence\n"
    assert found[f"{_INFO}/WHEEL"].decode() == (
        "Wheel-Version: 1.0\nGenerator: dsops_builder\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"
    )
    metadata = Parser().parsestr(found[f"{_INFO}/METADATA"].decode())
    assert metadata.get_all("License-File") == ["LICENSE", "LICENSE.deepspeed"]
    assert metadata.get_payload() == "License-File: is a word here.\n"


def test_the_manifest_is_of_the_bytes_in_the_wheel(contents: Contents, elf_samples: Path, tmp_path: Path) -> None:
    path = _seal(contents, tmp_path)
    assert path == tmp_path / "dist" / _REPAIRED
    with WheelFile(path) as wheel:
        text = wheel.read(f"{_ROOT}/manifest.json").decode()
        tags = [line for line in wheel.read(f"{_INFO}/WHEEL").decode().splitlines() if not line.startswith("G")]
        assert all(wheel.read(name) is not None for name in wheel.namelist())
    assert tags == [
        "Wheel-Version: 1.0",
        "Root-Is-Purelib: false",
        "Tag: py3-none-manylinux2014_x86_64",
        "Tag: py3-none-manylinux_2_17_x86_64",
    ]
    content = (elf_samples / "portable.so").read_bytes()
    assert Manifest.from_json(text, "manifest.json") == Manifest(
        distribution="dsops-prebuilt",
        version=__version__,
        build=1,
        label="portable",
        provenance=(("host_compiler", "gcc-10 10.2.1"),),
        artifacts=(
            Artifact(
                file=_FILE,
                sha256=hashlib.sha256(content).hexdigest(),
                size=len(content),
                tier="portable",
                op="sample",
                accelerators=("cpu", "cuda"),
                module="deepspeed.ops.sample.sample_op",
                machine="x86_64",
                simd=Simd.X86_64,
                glibc=(2, 14),
                python=None,
                torch=None,
                cuda=None,
                sources=(
                    SourceDigest(
                        sha256="0" * 64,
                        closure=("sample/sample.cpp", "includes/sample.h"),
                        deepspeed=("0.19.8",),
                    ),
                ),
                defines=(),
                needed=("libc.so.6",),
            ),
        ),
    )


def test_the_same_input_gives_the_same_bytes(contents: Contents, tmp_path: Path) -> None:
    one = _seal(contents, tmp_path / "one")
    os.utime(contents.loader, (1, 1))
    contents.artifacts[0].path.chmod(0o600)
    other = _seal(contents, tmp_path / "other")
    assert one.read_bytes() == other.read_bytes()


def test_artifacts_of_two_accelerators_and_levels_have_places_of_their_own(
    contents: Contents, portable_sample: PortableSample, tmp_path: Path
) -> None:
    own = replace(contents.artifacts[0].op, id="sample_cpu", accelerators=("cpu",))
    more = (
        portable_sample("portable.so", "0.19.8", op=own),
        portable_sample("portable.so", "0.14.4", "0.19.7", simd=Simd.X86_64_V3, kernel="avx256"),
    )
    with ZipFile(_seal(replace(contents, artifacts=(*contents.artifacts, *more)), tmp_path)) as archive:
        manifest = Manifest.from_json(archive.read(f"{_ROOT}/manifest.json"), "manifest.json")
    assert [(one.file, one.op, one.accelerators) for one in manifest.artifacts] == [
        (_FILE, "sample", ("cpu", "cuda")),
        ("sample_cpu/ds0.19.8/x86_64/sample_op.scalar.so", "sample", ("cpu",)),
        ("sample/ds0.14.4/x86_64_v3/sample_op.avx256.so", "sample", ("cpu", "cuda")),
    ]


def test_a_library_that_the_repair_lost(contents: Contents, portable_sample: PortableSample, tmp_path: Path) -> None:
    raw = platform_wheel.pack(contents, tmp_path)
    more = replace(contents, artifacts=(*contents.artifacts, portable_sample(simd=Simd.X86_64_V3, kernel="avx256")))
    with pytest.raises(GateError) as caught:
        platform_wheel.seal(raw, more, tmp_path / "dist")
    assert str(caught.value) == (
        f"{_RAW}: {_ROOT}/sample/ds0.19.8/x86_64_v3/sample_op.avx256.so was lost in the repair"
    )
    assert not (tmp_path / "dist").exists()


def test_a_library_that_cannot_be_read(contents: Contents, tmp_path: Path) -> None:
    contents.artifacts[0].path.write_bytes(b"\x7fELF")
    with pytest.raises(GateError, match=r"^sample_op\.so: not a readable ELF file: "):
        _seal(contents, tmp_path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a loader, the builder beside it, and what earlier runs leave in a source tree."""
    root = tmp_path / "project-root"
    files = {
        "pyproject.toml": "[project]\n",
        "README.md": "",
        "LICENSE": "",
        "src/dsops_prebuilt/__init__.py": "",
        "src/dsops_prebuilt/py.typed": "",
        "src/dsops_prebuilt/portable/_library.py": "",
        "src/dsops_prebuilt/__pycache__/__init__.cpython-311.pyc": "",
        "src/dsops_prebuilt.egg-info/SOURCES.txt": "",
        "src/dsops_prebuilt_activate.py": "",
        "src/dsops_prebuilt_activate.pth": "",
        "src/dsops_builder/cli.py": "",
        "build/lib/dsops_prebuilt/old.py": "",
        "ops/cpu_adam/op.yaml": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


class Pip:
    """Answers ``pip wheel`` with a wheel of these files, and remembers what it was given to build."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.given: set[str] = set()
        self.env: Mapping[str, str] = {}

    def run(self, command: Any, *, env: Mapping[str, str] | None = None, **_: Any) -> str:
        words = list(command)
        copy = Path(words[-1])
        self.given = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
        self.env = env or {}
        folder = Path(words[words.index("--wheel-dir") + 1])
        write_wheel(folder / f"dsops_prebuilt-{__version__}-py3-none-any.whl", dict.fromkeys(self.names, b""))
        return ""


_FILES = {
    "dsops_prebuilt/__init__.py",
    "dsops_prebuilt/py.typed",
    "dsops_prebuilt/portable/_library.py",
    "dsops_prebuilt_activate.py",
    "dsops_prebuilt_activate.pth",
}


def _place(tmp_path: Path) -> Workplace:
    variables = {"PATH": "/usr/bin", "SOURCE_DATE_EPOCH": "1700000000"}
    return Workplace(dist=tmp_path / "dist", cache=tmp_path / "cache", variables=variables, licenses=())


def test_the_loader_is_built_from_a_copy_without_what_earlier_runs_left(project: Path, tmp_path: Path) -> None:
    pip, folder = Pip(_FILES), tmp_path / "scratch"
    folder.mkdir()
    built = build_loader(project, folder, _place(tmp_path), pip)
    assert built == folder / f"dsops_prebuilt-{__version__}-py3-none-any.whl"
    assert pip.given == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "src/dsops_builder/cli.py",
        *(f"src/{name}" for name in _FILES),
    }
    # Dates are the zip format's first, whatever the environment says.
    assert pip.env == {"PATH": "/usr/bin", "SOURCE_DATE_EPOCH": "315532800"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            _FILES - {"dsops_prebuilt/portable/_library.py"},
            "lacks ['dsops_prebuilt/portable/_library.py'], and holds nothing beside the loader",
        ),
        (
            _FILES | {"dsops_prebuilt/old.py"},
            "lacks nothing, and holds ['dsops_prebuilt/old.py'] beside the loader",
        ),
    ],
    ids=["a module too few", "a module too many"],
)
def test_a_loader_that_is_not_the_source_trees(project: Path, tmp_path: Path, names: set[str], message: str) -> None:
    (tmp_path / "scratch").mkdir()
    with pytest.raises(GateError) as caught:
        build_loader(project, tmp_path / "scratch", _place(tmp_path), Pip(names))
    assert str(caught.value) == f"dsops_prebuilt-{__version__}-py3-none-any.whl: {message}"
