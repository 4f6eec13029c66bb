"""A sealed wheel of samples through every gate of the wheel, whole and tampered with."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import pytest

from dsops_builder.core import platform_wheel
from dsops_builder.core.platform_wheel import Contents
from dsops_builder.errors import GateError
from dsops_builder.fatbin import asked_for
from dsops_builder.model import Compiled
from dsops_builder.portable import PortableArtifact
from dsops_builder.verify import CORE_BUDGET, Context, verify_wheel
from dsops_builder.wheel import Payload, archive_order, member, pack, seal, write_wheel
from dsops_prebuilt._variant import GpuArch, Simd

CompiledSample = Callable[..., Compiled]
_NAME = "dsops_prebuilt_cu118-0.1.0-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
_ROOT = "dsops_prebuilt_payloads/cu118"
_INFO = "dsops_prebuilt_cu118-0.1.0.dist-info"
_FILE = "torch2.7/sample/ds0.19.8/x86_64/sample_op.cpython-311-x86_64-linux-gnu.so"
_SO = f"{_ROOT}/{_FILE}"
_ARCHS = (GpuArch(8, 0), GpuArch(9, 0, "", ptx=True))
_LISTS = {
    "--list-elf": "ELF file 1: op.1.sm_80.cubin\nELF file 2: op.2.sm_90.cubin\n",
    "--list-ptx": "PTX file 1: op.1.sm_90.ptx\n",
}


def _seal(folder: Path, *compiled: Compiled) -> Path:
    payload = Payload(version="0.1.0", compiled=compiled)
    raw = pack(payload, folder / "raw")
    return seal(raw.rename(raw.with_name(_NAME)), payload, folder / "dist", gpu_code=lambda _: asked_for(_ARCHS))


def _edit(path: Path, changes: Mapping[str, bytes | None], name: str = _NAME) -> Path:
    """The wheel with members replaced, added or (None) left out, under ``name``; RECORD is made to fit."""
    with ZipFile(path) as archive:
        contents = {file: archive.read(file) for file in archive.namelist() if not file.endswith("/RECORD")}
    edited = {file: content for file, content in {**contents, **changes}.items() if content is not None}
    return write_wheel(path.parent / "edited" / name, edited)


def _failures(path: Path, context: Context) -> list[str]:
    with pytest.raises(GateError) as caught:
        verify_wheel(path, context)
    first, *rest = str(caught.value).splitlines()
    assert first == f"{path.name}: {len(rest)} failed:"
    return [line.strip() for line in rest]


@pytest.fixture
def context(elf_samples: Path, fake_runner: Any) -> Context:
    return Context(
        runner=fake_runner(lambda command: _LISTS[command[1]]),
        cuobjdump=Path("/cuda/bin/cuobjdump"),
        torch_libs={"2.7": elf_samples},
        archs={},
        forbidden=("/build",),
    )


@pytest.fixture
def sealed(compiled_sample: CompiledSample, tmp_path: Path) -> Path:
    return _seal(tmp_path, compiled_sample())


def test_what_was_checked(sealed: Path, context: Context) -> None:
    size = sealed.stat().st_size
    assert verify_wheel(sealed, context) == (
        f"{_NAME}: RECORD, metadata, tag, contents, size {size}, build paths, archive, manifest",
        f"{_FILE}: x86_64, instructions up to x86_64, DT_NEEDED, search paths, symbols against torch 2.7",
    )


def test_what_was_left_out_is_said(compiled_sample: CompiledSample, fake_runner: Any, tmp_path: Path) -> None:
    path = _seal(tmp_path, compiled_sample("gpu.so", kernel="cuda"))
    (_, line) = verify_wheel(path, Context(runner=fake_runner(lambda _: "")))
    assert line == (
        f"{_FILE}: x86_64, instructions up to x86_64, DT_NEEDED, search paths, "
        "symbols NOT checked (no torch at hand), GPU code NOT checked (no cuobjdump at hand)"
    )


def test_gpu_code(compiled_sample: CompiledSample, context: Context, tmp_path: Path) -> None:
    path = _seal(tmp_path, compiled_sample("gpu.so", kernel="cuda"))
    asked = replace(context, archs={"2.7": _ARCHS})
    assert verify_wheel(path, asked)[1].endswith("symbols against torch 2.7, SASS 8.0 9.0, PTX 9.0")
    assert _failures(path, replace(context, archs={"2.7": _ARCHS, "2.6": _ARCHS})) == [
        f"{_NAME}: GPU code: found none; wanted some for torch 2.6"
    ]
    assert _failures(path, replace(asked, cuobjdump=None)) == [
        f"{_SO}: GPU code: found no cuobjdump to list it with; wanted one"
    ]


@pytest.mark.parametrize(
    ("sample", "kernel", "message"),
    [
        ("host.so", "cuda", "GPU code: found no GPU code; wanted some, as the manifest lists"),
        ("gpu.so", "host", "GPU code: found GPU code; wanted none, as the manifest lists"),
    ],
)
def test_gpu_code_that_is_missing_or_too_much(
    compiled_sample: CompiledSample, context: Context, sample: str, kernel: str, message: str
) -> None:
    compiled = compiled_sample(sample, kernel=kernel)
    assert f"{_SO}: {message}" in _failures(_seal(compiled.path.parent, compiled), context)


def test_every_failure_of_every_file_is_listed(
    compiled_sample: CompiledSample, context: Context, tmp_path: Path
) -> None:
    faulty = compiled_sample("faulty.so")
    wide = compiled_sample("avx512.so", simd=Simd.X86_64_V3)
    found = _failures(_seal(tmp_path, faulty, wide), context)
    wide_so = _SO.replace("x86_64/", "x86_64_v3/")
    assert [line.partition("; wanted ")[0] for line in found] == [
        f"{_SO}: build path: found '/build/lib'",
        f"{_SO}: DT_NEEDED: found libcurand.so.10",
        f"{_SO}: search path: found RPATH or RUNPATH /build/lib",
        f"{_SO}: symbols: found nowhere undefined",
        next(line.partition("; wanted ")[0] for line in found if line.startswith(f"{wide_so}: instructions")),
    ]


def test_size(sealed: Path, context: Context) -> None:
    size = sealed.stat().st_size
    assert _failures(sealed, replace(context, budget=size - 1)) == [
        f"{_NAME}: size: found {size} bytes; wanted at most {size - 1}"
    ]


@pytest.mark.parametrize("name", ["dsops-0.1.0.whl", "no wheel.txt"])
def test_a_name_that_is_no_wheel_s(sealed: Path, context: Context, name: str) -> None:
    with pytest.raises(GateError, match=r": not a readable wheel: "):
        verify_wheel(sealed.rename(sealed.with_name(name)), context)


def test_a_broken_archive(sealed: Path, context: Context) -> None:
    content = bytearray(sealed.read_bytes())
    content[len(_SO) + 60] ^= 0xFF
    sealed.write_bytes(content)
    with pytest.raises(GateError, match=r": not a readable wheel: "):
        verify_wheel(sealed, context)


def test_archive_of_another_writer(sealed: Path, context: Context) -> None:
    with ZipFile(sealed) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(sealed, "w") as archive:
        for name in archive_order(contents):
            entry = member(name)
            if name == _SO:
                entry.date_time, entry.compress_type = (2026, 1, 2, 3, 4, 6), ZIP_STORED
            archive.writestr(entry, contents[name])
    assert _failures(sealed, context) == [
        f"{_SO}: archive: found date_time (2026, 1, 2, 3, 4, 6); wanted (1980, 1, 1, 0, 0, 0)",
        f"{_SO}: archive: found compress_type 0; wanted 8",
    ]


def test_archive_out_of_order(sealed: Path, context: Context) -> None:
    with ZipFile(sealed) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(sealed, "w") as archive:
        for name in reversed(archive_order(contents)):
            archive.writestr(member(name), contents[name])
    (failure,) = _failures(sealed, context)
    assert failure.startswith(f"{_NAME}: archive: found {_INFO}/RECORD, {_INFO}/WHEEL, ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({_SO: b"\x7fELF"}, f"{_SO}: RECORD: found sha256=", id="changed file"),
        pytest.param({"more.txt": b"more"}, "more.txt: RECORD: found sha256=", id="file that is not listed"),
        pytest.param({_SO: None}, f"{_SO}: RECORD: found no such file; wanted sha256=", id="listed file not there"),
        pytest.param({f"{_INFO}/RECORD": None}, f"{_INFO}/RECORD: RECORD: found none; wanted one", id="no RECORD"),
    ],
)
def test_record(sealed: Path, context: Context, changes: dict[str, bytes | None], message: str) -> None:
    with ZipFile(sealed) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents = {name: content for name, content in {**contents, **changes}.items() if content is not None}
    with ZipFile(sealed, "w") as archive:
        for name in archive_order(contents):
            archive.writestr(member(name), contents[name])
    assert any(failure.startswith(message) for failure in _failures(sealed, context))


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("manylinux_2_5_x86_64", "tag: found manylinux_2_5_x86_64; wanted one of manylinux_2_17_x86_64, manylinux2014"),
        ("manylinux_2_31_x86_64", "tag: found manylinux_2_31_x86_64; wanted one of manylinux_2_17_x86_64, "),
        ("linux_x86_64", "tag: found linux_x86_64; wanted one of "),
    ],
)
def test_false_tag(sealed: Path, context: Context, platform: str, message: str) -> None:
    name = f"dsops_prebuilt_cu118-0.1.0-1-cp311-cp311-{platform}.whl"
    wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-{platform}\nBuild: 1\n"
    path = _edit(sealed, {f"{_INFO}/WHEEL": wheel.encode()}, name)
    (failure,) = _failures(path, context)
    assert failure.startswith(f"{name}: {message}")


def test_newer_symbols_than_any_tag_allowed(
    compiled_sample: CompiledSample, elf_samples: Path, context: Context, tmp_path: Path
) -> None:
    newer = (elf_samples / "host.so").read_bytes().replace(b"GLIBC_2.14", b"GLIBC_2.34")
    found = _failures(_seal(tmp_path, compiled_sample(newer)), context)
    assert found == [
        f"{_NAME}: tag: found {platform}; wanted one of none, because of libc.so.6 GLIBC_2.34"
        for platform in ("manylinux2014_x86_64", "manylinux_2_17_x86_64")
    ]


_METADATA = "Metadata-Version: 2.4\nName: dsops-prebuilt-cu118\nVersion: 0.1.0\nRequires-Dist: dsops-prebuilt==0.1.0\n"
_WHEEL = (
    "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nBuild: 1\n"
    "Tag: cp311-cp311-manylinux2014_x86_64\nTag: cp311-cp311-manylinux_2_17_x86_64\n"
)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        pytest.param("METADATA", _METADATA.replace("-cu118", "-cu126"), "METADATA Name dsops-prebuilt-cu126", id="name"),
        pytest.param("METADATA", _METADATA.replace("Version: 0.1.0", "Version: 0.2.0"), "METADATA Version 0.2.0", id="version"),
        pytest.param("METADATA", _METADATA.replace("==0.1.0", ">=0.1"), "METADATA Requires-Dist dsops-prebuilt>=0.1", id="core"),
        pytest.param("METADATA", _METADATA.replace("Name", "Nam"), "unrecognized field: 'nam'; 'name' is a req", id="invalid"),
        pytest.param("WHEEL", _WHEEL.replace("Build: 1\n", ""), "WHEEL Build none", id="no build"),
        pytest.param("WHEEL", _WHEEL.replace("Build: 1", "Build: 2"), "WHEEL Build 2", id="other build"),
        pytest.param("WHEEL", _WHEEL.replace("cp311-cp311-manylinux2014", "cp312-cp312-manylinux2014"), "WHEEL Tag cp311-cp311-manylinux_2_17_x86_64, cp312-", id="tag"),
        pytest.param("WHEEL", _WHEEL.replace("false", "true"), "WHEEL Root-Is-Purelib true", id="purelib"),
    ],
)  # fmt: skip
def test_metadata(sealed: Path, context: Context, file: str, text: str, message: str) -> None:
    (failure,) = _failures(_edit(sealed, {f"{_INFO}/{file}": text.encode()}), context)
    assert failure.startswith(f"{_NAME}: metadata: found {message}")


def test_another_build_tag_in_the_name(sealed: Path, context: Context) -> None:
    name = _NAME.replace("-1-", "-2-")
    assert _failures(sealed.rename(sealed.with_name(name)), context) == [
        f"{name}: metadata: found WHEEL Build 1; wanted 2",
        f"{name}: metadata: found manifest build 1; wanted 2",
    ]


def test_another_python_in_the_name(sealed: Path, context: Context) -> None:
    name = _NAME.replace("cp311", "cp312")
    found = _failures(sealed.rename(sealed.with_name(name)), context)
    assert f"{_SO}: python: found in a wheel for ['cp312-cp312']; wanted cp311-cp311" in found


def _manifest(sealed: Path, root: str = _ROOT, **changes: Any) -> bytes:
    with ZipFile(sealed) as archive:
        raw = json.loads(archive.read(f"{root}/manifest.json"))
    artifact = {key[9:]: changes.pop(key) for key in list(changes) if key.startswith("artifact_")}
    raw["artifacts"][0] |= artifact
    return json.dumps(raw | changes).encode()


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        pytest.param(
            {"artifact_sha256": "0" * 64}, [f"{_SO}: manifest: found sha256 "], id="hash"
        ),
        pytest.param(
            {"artifact_file": "gone.so"},
            [
                f"{_SO}: manifest: found a shared object that is not listed; wanted every one listed",
                f"{_ROOT}/gone.so: manifest: found listed, and not in the wheel; wanted every one there",
                f"{_ROOT}/gone.so: manifest: found folder none; wanted torch2.7/sample/ds0.19.8/x86_64",
            ],
            id="file",
        ),
        pytest.param(
            {"label": "cu126"},
            [
                f"{_ROOT}/manifest.json: manifest: found {_ROOT}; wanted dsops_prebuilt_payloads/cu126",
                f"{_ROOT}/manifest.json: manifest: found distribution dsops-prebuilt-cu118; wanted dsops-prebuilt-cu126, ",
            ],
            id="label",
        ),
        pytest.param({"build": 3}, [f"{_NAME}: metadata: found manifest build 3; wanted 1"], id="build"),
        pytest.param({"schema": 99}, [f"{_NAME}: manifest: found {_ROOT}/manifest.json: schema 99 is not 1"], id="schema"),
    ],
)  # fmt: skip
def test_manifest(sealed: Path, context: Context, changes: dict[str, Any], messages: list[str]) -> None:
    found = _failures(_edit(sealed, {f"{_ROOT}/manifest.json": _manifest(sealed, **changes)}), context)
    assert len(found) == len(messages)
    assert all(failure.startswith(message) for failure, message in zip(found, messages, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({f"{_ROOT}/manifest.json": None}, "no manifest.json", id="none"),
        pytest.param({f"{_ROOT}/a/manifest.json": b"{}"}, f"{_ROOT}/a/manifest.json, {_ROOT}/manifest.json", id="two"),
        pytest.param({f"{_ROOT}/manifest.json": b"\xff"}, f"{_ROOT}/manifest.json: 'utf-8' codec", id="no text"),
        pytest.param({f"{_ROOT}/manifest.json": b"[" * 100_000}, f"{_ROOT}/manifest.json: ", id="deep"),
    ],
)
def test_no_readable_manifest(sealed: Path, context: Context, changes: dict[str, bytes | None], message: str) -> None:
    (failure,) = _failures(_edit(sealed, changes), context)
    assert failure.startswith(f"{_NAME}: manifest: found {message}")


def test_a_shared_object_under_another_name(sealed: Path, elf_samples: Path, context: Context) -> None:
    path = _edit(sealed, {f"{_ROOT}/data.bin": (elf_samples / "host.so").read_bytes()})
    assert _failures(path, context) == [
        f"{_ROOT}/data.bin: manifest: found a shared object that is not listed; wanted every one listed"
    ]


def test_an_artifact_listed_twice(sealed: Path, context: Context) -> None:
    with ZipFile(sealed) as archive:
        raw = json.loads(archive.read(f"{_ROOT}/manifest.json"))
    raw["artifacts"] *= 2
    path = _edit(sealed, {f"{_ROOT}/manifest.json": json.dumps(raw).encode()})
    assert _failures(path, context) == [f"{_SO}: manifest: found listed 2 times; wanted once"]


def test_a_file_that_cannot_be_read(sealed: Path, context: Context) -> None:
    found = _failures(_edit(sealed, {_SO: b"\x7fELF"}), context)
    assert any(failure.startswith(f"{_SO}: ELF: found ") for failure in found)
    assert any(failure.startswith(f"{_NAME}: tag: found ") for failure in found)


@pytest.mark.parametrize(
    "name",
    [
        "aaa_evil.pth",
        "torch/evil.py",
        "dsops_prebuilt/_load.py",
        f"{_INFO}/entry_points.txt",
        "dsops_prebuilt_cu118-0.1.0.data/scripts/pip",
        f"{_ROOT}/__init__.py",
    ],
)
def test_a_payload_has_nothing_that_could_run(sealed: Path, context: Context, name: str) -> None:
    assert _failures(_edit(sealed, {name: b"import os\n", f"{_INFO}/licenses/LICENSE": b"text"}), context) == [
        f"{name}: contents: found a file that no payload has; "
        "wanted only manifest.json, what it lists, METADATA, WHEEL, RECORD and licenses/"
    ]


_TORCH = {"minor": "2.7", "exact": None, "cxx11_abi": True, "built_with": "2.7.1+cu126"}
_FOLDER = "folder torch2.7/sample/ds0.19.8/x86_64"
_SOURCE = {"sha256": "0" * 64, "closure": ["sample/sample.cpp"], "deepspeed": ["0.19.8"]}


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        pytest.param(
            {"torch": {**_TORCH, "minor": "2.6"}},
            [
                "torch.minor 2.6; wanted 2.7, of torch 2.7.1+cu126",
                f"{_FOLDER}; wanted torch2.6/sample/ds0.19.8/x86_64 or torch2.6/sample_cpu_cuda/ds0.19.8/x86_64",
            ],
            id="torch's minor",
        ),
        pytest.param(
            {"torch": {**_TORCH, "exact": "2.7.1"}},
            ["torch.exact 2.7.1; wanted None, for torch 2.7.1+cu126"],
            id="exact of a release",
        ),
        pytest.param(
            {"torch": {**_TORCH, "built_with": "2.7.1+git1234"}},
            ["torch.exact None; wanted 2.7.1+git1234, for torch 2.7.1+git1234"],
            id="no exact for another build",
        ),
        pytest.param(
            {"sources": []},
            [
                "no sources; wanted at least one digest of sources",
                f"{_FOLDER}; wanted that of a DeepSpeed release",
            ],
            id="no sources",
        ),
        pytest.param(
            {"sources": [{**_SOURCE, "closure": []}]},
            [f"sources {'0' * 64} of 0 files; wanted a sha256, the files that it is of, and the DeepSpeed releases"],
            id="no closure",
        ),
        pytest.param(
            {"sources": [{**_SOURCE, "sha256": ""}]},
            [
                "sources without a digest of 1 files; wanted a sha256, the files that it is of, and the DeepSpeed releases"
            ],
            id="no digest",
        ),
        pytest.param(
            {"sources": [{**_SOURCE, "deepspeed": ["0.19.7"]}]},
            [f"{_FOLDER}; wanted torch2.7/sample/ds0.19.7/x86_64 or torch2.7/sample_cpu_cuda/ds0.19.7/x86_64"],
            id="another release",
        ),
        pytest.param(
            {"op": "other"},
            [
                "module deepspeed.ops.sample.sample_op; wanted one that ends in .other_op, for the op other",
                f"{_FOLDER}; wanted torch2.7/other/ds0.19.8/x86_64 or torch2.7/other_cpu_cuda/ds0.19.8/x86_64",
            ],
            id="op",
        ),
        pytest.param({"accelerators": []}, ["accelerators none; wanted each once, of cpu, cuda"], id="no accelerator"),
        pytest.param(
            {"accelerators": ["cuda", "npu"]}, ["accelerators cuda, npu; wanted each once, of cpu, cuda"], id="npu"
        ),
        pytest.param(
            {"simd": "x86_64_v3"},
            [f"{_FOLDER}; wanted torch2.7/sample/ds0.19.8/x86_64_v3 or torch2.7/sample_cpu_cuda/ds0.19.8/x86_64_v3"],
            id="SIMD level",
        ),
        pytest.param(
            {"torch": None},
            [
                "a stock artifact without a torch or a Python; wanted both",
                f"{_FOLDER}; wanted sample/ds0.19.8/x86_64 or sample_cpu_cuda/ds0.19.8/x86_64",
            ],
            id="no torch",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself(
    sealed: Path, context: Context, changes: dict[str, Any], messages: list[str]
) -> None:
    manifest = _manifest(sealed, **{f"artifact_{key}": value for key, value in changes.items()})
    found = _failures(_edit(sealed, {f"{_ROOT}/manifest.json": manifest}), replace(context, torch_libs=None))
    assert [line for line in found if ": manifest: " in line] == [f"{_SO}: manifest: found {text}" for text in messages]


def test_no_python_for_a_file_that_is_named_for_one(sealed: Path, context: Context) -> None:
    manifest = _manifest(sealed, artifact_python=None, artifact_tier="portable")
    found = _failures(_edit(sealed, {f"{_ROOT}/manifest.json": manifest}), context)
    assert f"{_SO}: manifest: found no Python, and a file name for one; wanted the Python of the file name" in found


def test_a_toolkit_of_another_label(compiled_sample: CompiledSample, context: Context, tmp_path: Path) -> None:
    path = _seal(tmp_path, compiled_sample("gpu.so", kernel="cuda", toolkit="11.7"))
    assert _failures(path, replace(context, archs=None)) == [
        f"{_SO}: manifest: found toolkit 11.7 in the payload cu118; wanted the toolkit of the label"
    ]


_CORE = "dsops_prebuilt-0.1.0-py3-none-any.whl"
_CORE_INFO = "dsops_prebuilt-0.1.0.dist-info"


Core = Callable[..., Path]


@pytest.fixture
def core(loader_members: dict[str, bytes], tmp_path: Path) -> Core:
    """Makes the loader's wheel, with members replaced, added or (None) left out."""

    def make(changes: Mapping[str, bytes | None], name: str = _CORE) -> Path:
        return _foreign(tmp_path, {**loader_members, **changes}, name)

    return make


def _foreign(folder: Path, members: Mapping[str, bytes | None], name: str) -> Path:
    """A wheel as another writer would leave it: other order, dates and modes."""
    contents = {file: text for file, text in members.items() if text is not None}
    path = write_wheel(folder / "core" / name, contents)
    with ZipFile(path) as archive:
        written = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with ZipFile(path, "w") as archive:
        for file in reversed(written):
            archive.writestr(ZipInfo(file, date_time=(2026, 1, 1, 0, 0, 0)), written[file])
    return path


def test_the_loader_has_gates_of_its_own(context: Context, core: Core) -> None:
    path = core({})
    size = path.stat().st_size
    assert verify_wheel(path, context) == (
        f"{_CORE}: RECORD, metadata, tag, contents, size {size}, build paths, entry point",
    )


_FOREIGN = "contents: found a file that the loader does not have; wanted only dsops_prebuilt/, "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"dsops_builder/cli.py": b""}, f"dsops_builder/cli.py: {_FOREIGN}", id="builder"),
        pytest.param({"aaa_evil.pth": b""}, f"aaa_evil.pth: {_FOREIGN}", id="another hook"),
        pytest.param({"dsops_prebuilt/x.so": b""}, f"dsops_prebuilt/x.so: {_FOREIGN}", id="shared object"),
        pytest.param({"dsops_prebuilt/x.py": b"\x7fELF"}, f"dsops_prebuilt/x.py: {_FOREIGN}", id="ELF"),
        pytest.param({"dsops_prebuilt_activate.pth": None}, f"{_CORE}: contents: found no dsops_prebuilt_activate.pth", id="pth"),
        pytest.param({"dsops_prebuilt_activate.start": None}, f"{_CORE}: contents: found no dsops_prebuilt_activate.start", id="start"),
        pytest.param({"dsops_prebuilt/__init__.py": None}, f"{_CORE}: contents: found no dsops_prebuilt/__init__.py", id="package"),
        pytest.param({f"{_CORE_INFO}/entry_points.txt": None}, f"{_CORE}: entry point: found ", id="no entry points"),
        pytest.param({f"{_CORE_INFO}/entry_points.txt": b"\xff"}, f"{_CORE}: entry point: found 'utf-8' codec", id="no text"),
        pytest.param({f"{_CORE_INFO}/entry_points.txt": b"[console_scripts]\na = b:c\n"}, f"{_CORE}: entry point: found No section: 'torch.backends'; wanted ", id="no entry point"),
        pytest.param({f"{_CORE_INFO}/METADATA": b"Metadata-Version: 2.4\nName: dsops-prebuilt\nVersion: 0.2.0\n"}, f"{_CORE}: metadata: found METADATA Version 0.2.0; wanted 0.1.0", id="version"),
        pytest.param({f"{_CORE_INFO}/WHEEL": b"Root-Is-Purelib: false\nTag: py3-none-any\n"}, f"{_CORE}: metadata: found WHEEL Root-Is-Purelib false; wanted true", id="purelib"),
    ],
)  # fmt: skip
def test_faults_of_the_loader(context: Context, core: Core, changes: dict[str, bytes | None], message: str) -> None:
    (failure,) = _failures(core(changes), context)
    assert failure.startswith(message)


def test_a_loader_for_one_python(context: Context, loader_members: dict[str, bytes], tmp_path: Path) -> None:
    wheel = b"Root-Is-Purelib: true\nTag: cp311-none-any\n"
    name = _CORE.replace("py3", "cp311")
    path = write_wheel(tmp_path / name, {**loader_members, f"{_CORE_INFO}/WHEEL": wheel})
    assert _failures(path, context) == [
        f"{name}: tag: found {name}: for any; wanted one of x86_64, aarch64; wanted a wheel that auditwheel reads",
        f"{name}: manifest: found no manifest.json; wanted one manifest.json that this release reads",
        f"{name}: metadata: found WHEEL Root-Is-Purelib true; wanted false",
    ]


_MACHINE_CORE = "dsops_prebuilt-0.1.0-py3-none-manylinux_2_17_x86_64.whl"
_PORTABLE = "dsops_prebuilt_payloads/portable"
_PORTABLE_SO = f"{_PORTABLE}/sample/ds0.19.8/x86_64/sample_op.scalar.so"
PortableSample = Callable[..., PortableArtifact]
PlatformCore = Callable[..., Path]


@pytest.fixture
def platform_core(loader_wheel: Path, portable_sample: PortableSample, tmp_path: Path) -> PlatformCore:
    """Makes a core wheel with portable artifacts: the good sample, or those that are given."""

    def make(*artifacts: PortableArtifact, name: str = _MACHINE_CORE) -> Path:
        contents = Contents(
            loader=loader_wheel,
            artifacts=artifacts or (portable_sample(),),
            license_text="DeepSpeed's",
            provenance=(("host_compiler", "gcc-10 10.2.1"),),
        )
        raw = platform_wheel.pack(contents, tmp_path / "raw")
        return platform_wheel.seal(raw.rename(raw.with_name(name)), contents, tmp_path / "dist")

    return make


def test_a_core_wheel_with_the_portable_tier(context: Context, platform_core: PlatformCore) -> None:
    path = platform_core()
    size = path.stat().st_size
    # Nothing in it is bound to a torch, so there is nothing to leave out where no torch is at hand.
    for surroundings in (context, Context(runner=context.runner)):
        assert verify_wheel(path, surroundings) == (
            f"{_MACHINE_CORE}: RECORD, metadata, tag, contents, size {size}, build paths, entry point, archive, manifest",
            "sample/ds0.19.8/x86_64/sample_op.scalar.so: x86_64, instructions up to x86_64, DT_NEEDED, search paths, symbols",
        )


def test_every_failure_of_a_portable_library_is_listed(
    context: Context, platform_core: PlatformCore, portable_sample: PortableSample
) -> None:
    system = "ld-linux-aarch64.so.1, ld-linux-x86-64.so.2, libc.so.6, libgcc_s.so.1, libm.so.6, libpthread.so.0, libstdc++.so.6"
    tag, *found = _failures(platform_core(portable_sample("unportable.so")), context)
    names = ("abi", "bind_openmp", "call", "count", "entry", "failure", "name", "openmp_of", "released", "signature")
    # What the libgomp of this machine asks for is told too.
    assert tag.startswith(f"{_MACHINE_CORE}: tag: found manylinux_2_17_x86_64; wanted one of none, because of ")
    assert "libgomp.so.1, which the tag does not allow" in tag
    assert found == [
        f"{_PORTABLE_SO}: DT_NEEDED: found libgomp.so.1; wanted only {system}",
        f"{_PORTABLE_SO}: exports: found GOMP_parallel; wanted only {', '.join(f'dsops_{name}' for name in names)}",
        f"{_PORTABLE_SO}: exports: found no dsops_call; wanted it, for the loader calls it",
        f"{_PORTABLE_SO}: symbols: found GOMP_barrier undefined; "
        "wanted every symbol without a version defined by the system's libraries",
    ]


def test_a_portable_library_of_a_higher_level_than_it_says(
    context: Context, platform_core: PlatformCore, portable_sample: PortableSample
) -> None:
    found = _failures(platform_core(portable_sample("avx512.so", simd=Simd.X86_64_V3)), context)
    assert any(": instructions: found vaddps zmm3,zmm2,zmm1 at " in failure for failure in found)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        pytest.param(
            {"artifact_python": "cp311"},
            [
                f"{_PORTABLE_SO}: manifest: found a portable artifact bound to python; wanted none of python, torch, cuda",
                f"{_PORTABLE_SO}: python: found in a wheel for ['py3-none']; wanted cp311-cp311",
                f"{_PORTABLE_SO}: python: found file name sample_op.scalar.so; wanted sample_op.cpython-311-x86_64-linux-gnu.so",
                f"{_PORTABLE_SO}: python: found no such function; wanted PyInit_sample_op defined",
            ],
            id="bound to a python",
        ),
        pytest.param(
            {"artifact_torch": {**_TORCH, "minor": "2.7"}},
            [
                f"{_PORTABLE_SO}: manifest: found a portable artifact bound to torch; wanted none of python, torch, cuda",
                f"{_PORTABLE_SO}: manifest: found folder sample/ds0.19.8/x86_64; wanted torch2.7/sample/ds0.19.8/x86_64 "
                "or torch2.7/sample_cpu_cuda/ds0.19.8/x86_64",
            ],
            id="bound to a torch",
        ),
        pytest.param(
            {"artifact_cuda": {"toolkit": "11.8", "sass": ["8.0"], "ptx": []}},
            [
                f"{_PORTABLE_SO}: manifest: found toolkit 11.8 in the payload portable; wanted the toolkit of the label",
                f"{_PORTABLE_SO}: manifest: found a portable artifact bound to cuda; wanted none of python, torch, cuda",
                f"{_PORTABLE_SO}: GPU code: found no GPU code; wanted some, as the manifest lists",
            ],
            id="bound to CUDA",
        ),
        pytest.param(
            {"artifact_tier": "stock"},
            [
                f"{_PORTABLE_SO}: manifest: found tier stock; wanted portable, in the payload portable",
                f"{_PORTABLE_SO}: manifest: found a stock artifact without a torch or a Python; wanted both",
            ],
            id="stock artifact",
        ),
        pytest.param(
            {"artifact_sources": [{**_SOURCE, "deepspeed": ["0.19.7"]}]},
            [
                f"{_PORTABLE_SO}: manifest: found folder sample/ds0.19.8/x86_64; wanted sample/ds0.19.7/x86_64 "
                "or sample_cpu_cuda/ds0.19.7/x86_64"
            ],
            id="another release",
        ),
        pytest.param(
            {"artifact_simd": "aarch64"},
            [
                f"{_PORTABLE_SO}: manifest: found folder sample/ds0.19.8/x86_64; wanted sample/ds0.19.8/aarch64 "
                "or sample_cpu_cuda/ds0.19.8/aarch64",
                f"{_PORTABLE_SO}: machine: found a file for x86_64, listed as x86_64; wanted aarch64, the machine of aarch64",
            ],
            id="another machine",
        ),
        pytest.param(
            {"distribution": "dsops-prebuilt-portable"},
            [
                f"{_MACHINE_CORE}: metadata: found manifest distribution dsops-prebuilt-portable; wanted dsops-prebuilt",
                f"{_PORTABLE}/manifest.json: manifest: found distribution dsops-prebuilt-portable; "
                "wanted dsops-prebuilt, for the label portable",
            ],
            id="another distribution",
        ),
        pytest.param(
            {"build": 2}, [f"{_MACHINE_CORE}: metadata: found manifest build 2; wanted 1"], id="another build"
        ),
        pytest.param(
            {"label": "cpu"},
            [
                f"{_PORTABLE}/manifest.json: manifest: found {_PORTABLE}; wanted dsops_prebuilt_payloads/cpu",
                f"{_PORTABLE}/manifest.json: manifest: found distribution dsops-prebuilt; wanted dsops-prebuilt-cpu, "
                "for the label cpu",
                f"{_PORTABLE_SO}: manifest: found tier portable; wanted stock, in the payload cpu",
            ],
            id="a payload's label",
        ),
    ],
)
def test_a_manifest_that_is_not_of_the_portable_tier(
    context: Context, platform_core: PlatformCore, changes: dict[str, Any], messages: list[str]
) -> None:
    path = platform_core()
    manifest = _manifest(path, _PORTABLE, **changes)
    edited = _edit(path, {f"{_PORTABLE}/manifest.json": manifest}, _MACHINE_CORE)
    assert _failures(edited, replace(context, torch_libs=None)) == messages


def test_a_portable_artifact_in_a_payload(sealed: Path, context: Context) -> None:
    manifest = _manifest(sealed, artifact_tier="portable")
    found = _failures(_edit(sealed, {f"{_ROOT}/manifest.json": manifest}), context)
    assert f"{_SO}: manifest: found tier portable; wanted stock, in the payload cu118" in found


def test_a_core_wheel_for_a_machine_without_a_manifest(context: Context, platform_core: PlatformCore) -> None:
    path = _edit(platform_core(), {f"{_PORTABLE}/manifest.json": None}, _MACHINE_CORE)
    assert _failures(path, context) == [
        f"{_MACHINE_CORE}: manifest: found no manifest.json; wanted one manifest.json that this release reads"
    ]


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("manylinux_2_5_x86_64", "tag: found manylinux_2_5_x86_64; wanted one of manylinux_2_17_x86_64, manylinux2014"),
        ("manylinux_2_31_x86_64", "tag: found manylinux_2_31_x86_64; wanted one of manylinux_2_17_x86_64, "),
        ("linux_x86_64", "tag: found linux_x86_64; wanted one of manylinux_2_17_x86_64, "),
        (
            "manylinux_2_17_aarch64",
            "tag: found dsops_prebuilt-0.1.0-py3-none-manylinux_2_17_aarch64.whl: auditwheel cannot read it: ",
        ),
    ],
)
def test_a_false_tag_of_a_core_wheel(
    context: Context, platform_core: PlatformCore, platform: str, message: str
) -> None:
    name = f"dsops_prebuilt-0.1.0-py3-none-{platform}.whl"
    wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n"
    failure, *rest = _failures(_edit(platform_core(), {f"{_CORE_INFO}/WHEEL": wheel.encode()}, name), context)
    assert failure.startswith(f"{name}: {message}")
    of_machine = f"{_PORTABLE_SO}: machine: found in a wheel for {platform}; wanted x86_64"
    assert rest == ([] if platform.endswith("x86_64") else [of_machine])


def _for_aarch64(artifact: PortableArtifact) -> PortableArtifact:
    """The sample as a file of aarch64: it says so, and asks for what glibc has there."""
    content = bytearray(artifact.path.read_bytes().replace(b"GLIBC_2.14", b"GLIBC_2.17"))
    struct.pack_into("<H", content, 18, 183)  # e_machine: EM_AARCH64
    artifact.path.write_bytes(content)
    return replace(artifact, simd=Simd.AARCH64, kernel="neon")


def test_what_is_not_looked_at_for_aarch64_is_said(
    context: Context, platform_core: PlatformCore, portable_sample: PortableSample
) -> None:
    path = platform_core(_for_aarch64(portable_sample()), name=_MACHINE_CORE.replace("x86_64", "aarch64"))
    assert verify_wheel(path, context)[1:] == (
        "sample/ds0.19.8/aarch64/sample_op.neon.so: aarch64, instructions NOT checked (only x86_64's are), DT_NEEDED, "
        "search paths, symbols",
    )


def test_a_library_of_another_machine_than_the_wheels(
    context: Context, platform_core: PlatformCore, portable_sample: PortableSample
) -> None:
    path = platform_core(portable_sample(), _for_aarch64(portable_sample()))
    assert _failures(path, context) == [
        f"{_PORTABLE}/sample/ds0.19.8/aarch64/sample_op.neon.so: machine: found in a wheel for manylinux_2_17_x86_64; "
        "wanted aarch64"
    ]


def test_a_byte_of_a_portable_library_that_changed_after_the_seal(
    context: Context, platform_core: PlatformCore, elf_samples: Path
) -> None:
    content = bytearray((elf_samples / "portable.so").read_bytes())
    content[-1] ^= 1
    path = _edit(platform_core(), {_PORTABLE_SO: bytes(content)}, _MACHINE_CORE)
    assert [line.partition(" sha256 ")[0] for line in _failures(path, context)] == [f"{_PORTABLE_SO}: manifest: found"]


def test_a_core_wheel_is_small(context: Context, platform_core: PlatformCore) -> None:
    noise = hashlib.shake_256(b"noise").digest(CORE_BUDGET)
    path = _edit(platform_core(), {f"{_CORE_INFO}/licenses/NOISE": noise}, _MACHINE_CORE)
    size = path.stat().st_size
    assert _failures(path, context) == [f"{_MACHINE_CORE}: size: found {size} bytes; wanted at most 3000000"]


def test_a_payload_may_be_larger_than_the_core(sealed: Path, context: Context) -> None:
    noise = hashlib.shake_256(b"noise").digest(CORE_BUDGET)
    verify_wheel(_edit(sealed, {f"{_INFO}/licenses/NOISE": noise}), context)


def test_the_loader_alone_under_the_name_of_a_machine(context: Context, loader_wheel: Path) -> None:
    tag, *found = _failures(loader_wheel.rename(loader_wheel.with_name(_MACHINE_CORE)), context)
    assert tag.startswith(f"{_MACHINE_CORE}: tag: found {_MACHINE_CORE}: auditwheel cannot read it: ")
    assert tag.endswith("; wanted a wheel that auditwheel reads")
    assert found == [
        f"{_MACHINE_CORE}: manifest: found no manifest.json; wanted one manifest.json that this release reads",
        f"{_MACHINE_CORE}: metadata: found WHEEL Tag py3-none-any; wanted py3-none-manylinux_2_17_x86_64",
        f"{_MACHINE_CORE}: metadata: found WHEEL Root-Is-Purelib true; wanted false",
    ]


def test_a_core_wheel_for_a_machine_under_the_name_of_the_loader_alone(
    context: Context, platform_core: PlatformCore
) -> None:
    path = platform_core()
    foreign = (
        "a file that the loader does not have; wanted only dsops_prebuilt/, dsops_prebuilt_activate.* and metadata"
    )
    assert _failures(path.rename(path.with_name(_CORE)), context) == [
        f"{_PORTABLE}/manifest.json: contents: found {foreign}",
        f"{_PORTABLE_SO}: contents: found {foreign}",
        f"{_CORE}: metadata: found WHEEL Tag py3-none-manylinux_2_17_x86_64; wanted py3-none-any",
        f"{_CORE}: metadata: found WHEEL Root-Is-Purelib false; wanted true",
    ]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        pytest.param("aaa_evil.pth", [f"aaa_evil.pth: {_FOREIGN}"], id="hook"),
        pytest.param("torch/evil.py", [f"torch/evil.py: {_FOREIGN}"], id="another package"),
        pytest.param("dsops_builder/cli.py", [f"dsops_builder/cli.py: {_FOREIGN}"], id="builder"),
        pytest.param("dsops_prebuilt-0.1.0.data/scripts/pip", [f"dsops_prebuilt-0.1.0.data/scripts/pip: {_FOREIGN}"], id="script"),
        pytest.param("dsops_prebuilt/_fast.so", [f"dsops_prebuilt/_fast.so: {_FOREIGN}", "dsops_prebuilt/_fast.so: manifest: found a shared object that is not listed; "], id="shared object of the loader"),
        pytest.param(f"{_PORTABLE}/more.so", [f"{_PORTABLE}/more.so: manifest: found a shared object that is not listed; "], id="shared object of the tier"),
        pytest.param(f"{_PORTABLE}/__init__.py", [f"{_PORTABLE}/__init__.py: contents: found a file that no payload has; "], id="code in the tier"),
        pytest.param("dsops_prebuilt_payloads/__init__.py", ["dsops_prebuilt_payloads/__init__.py: contents: found a file that no payload has; "], id="code beside the tier"),
        pytest.param("dsops_prebuilt_payloads/cpu/manifest.json", [f"{_MACHINE_CORE}: manifest: found dsops_prebuilt_payloads/cpu/manifest.json, {_PORTABLE}/manifest.json; "], id="another payload"),
    ],
)  # fmt: skip
def test_a_core_wheel_has_the_loader_and_the_tier_and_nothing_else(
    context: Context, platform_core: PlatformCore, elf_samples: Path, name: str, messages: list[str]
) -> None:
    content = (elf_samples / "libc10.so").read_bytes() if name.endswith(".so") else b"import os\n"
    found = _failures(_edit(platform_core(), {name: content}, _MACHINE_CORE), context)
    assert len(found) == len(messages)
    assert all(failure.startswith(message) for failure, message in zip(found, messages, strict=True))


def _rewrite(sealed: Path, changes: Mapping[str, bytes]) -> Path:
    """The wheel with members changed, and RECORD as ``changes`` has it."""
    with ZipFile(sealed) as archive:
        contents = {**{name: archive.read(name) for name in archive.namelist()}, **changes}
    with ZipFile(sealed, "w") as archive:
        for name in archive_order(contents):
            archive.writestr(member(name), contents[name])
    return sealed


@pytest.mark.parametrize(
    ("record", "message"),
    [
        pytest.param(b"\xff\xfe", "'utf-8' codec can't decode", id="no text"),
        pytest.param(b"a" * 200_000, "field larger than field limit", id="long field"),
    ],
)
def test_a_record_that_cannot_be_read(sealed: Path, context: Context, record: bytes, message: str) -> None:
    found = _failures(_rewrite(sealed, {f"{_INFO}/RECORD": record}), context)
    assert found[0].startswith(f"{_INFO}/RECORD: RECORD: found what cannot be read: {message}")


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "a/../../evil.py", "a//b", "./a", "..\\evil.py"])
def test_a_member_that_would_lie_elsewhere(sealed: Path, context: Context, name: str) -> None:
    with pytest.raises(GateError, match=r": not a readable wheel: the member '.+' is not below the wheel's folder"):
        verify_wheel(_rewrite(sealed, {name: b""}), context)


@pytest.mark.parametrize(
    ("local", "central", "value"),
    [pytest.param(6, 8, 1, id="encrypted"), pytest.param(8, 10, 99, id="unknown compression")],
)
def test_an_archive_that_zipfile_does_not_unpack(
    sealed: Path, context: Context, local: int, central: int, value: int
) -> None:
    content = bytearray(sealed.read_bytes())
    for start, place in ((content.index(b"PK\3\4"), local), (content.index(b"PK\1\2"), central)):
        content[start + place] = value  # APPNOTE 4.3.7 and 4.3.12: general purpose flags, compression method
    sealed.write_bytes(content)
    with pytest.raises(GateError, match=r": not a readable wheel: "):
        verify_wheel(sealed, context)


def test_a_damaged_shared_object_is_a_gate_error(sealed: Path, elf_samples: Path, context: Context) -> None:
    content = (elf_samples / "host.so").read_bytes()
    for place in range(4, len(content), 1201):
        for damaged in (content[:place], content[:place] + b"\xff\xff\xff" + content[place + 3 :]):
            with pytest.raises(GateError):
                verify_wheel(_edit(sealed, {_SO: damaged}), context)
