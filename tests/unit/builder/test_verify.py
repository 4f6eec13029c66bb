"""A sealed wheel of samples through every gate of the wheel, whole and tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import pytest

from dsops_builder.errors import GateError
from dsops_builder.fatbin import asked_for
from dsops_builder.model import Compiled
from dsops_builder.verify import Context, verify_wheel
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
        f"{_NAME}: archive, RECORD, metadata, manifest, tag, size {size}, build paths",
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
        pytest.param({f"{_INFO}/RECORD": None}, f"{_NAME}: RECORD: found none; wanted {_INFO}/RECORD", id="no RECORD"),
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


def _manifest(sealed: Path, **changes: Any) -> bytes:
    with ZipFile(sealed) as archive:
        raw = json.loads(archive.read(f"{_ROOT}/manifest.json"))
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
            ],
            id="file",
        ),
        pytest.param({"label": "cu126"}, [f"{_ROOT}/manifest.json: manifest: found {_ROOT}; wanted "], id="label"),
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
