"""What a payload wheel holds before and after the seal, and that nothing but the input decides its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from wheel.wheelfile import WheelFile

from dsops_builder.errors import GateError, MatrixError
from dsops_builder.fatbin import GpuCode
from dsops_builder.model import Compiled
from dsops_builder.wheel import Payload, Slot, archive_order, pack, seal, slots, write_wheel
from dsops_prebuilt._manifest import Artifact, CudaBinding, Manifest, SourceDigest, TorchBinding
from dsops_prebuilt._variant import CudaRelease, GpuArch, Simd

CompiledSample = Callable[..., Compiled]
_CODE = GpuCode(sass=(GpuArch(8, 0), GpuArch(9, 0)), ptx=(GpuArch(9, 0),))
_RAW = "dsops_prebuilt_cu118-0.1.0-1-cp311-cp311-linux_x86_64.whl"
_REPAIRED = "dsops_prebuilt_cu118-0.1.0-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
_SO = "sample_op.cpython-311-x86_64-linux-gnu.so"
_PLACE = f"torch2.7/sample/ds0.19.8/x86_64/{_SO}"
_ROOT = "dsops_prebuilt_payloads/cu118"
_INFO = "dsops_prebuilt_cu118-0.1.0.dist-info"


def _payload(*compiled: Compiled) -> Payload:
    return Payload(version="0.1.0", compiled=compiled, licenses=(("LICENSE", "Apache License\n"),))


def _no_gpu(path: Path) -> GpuCode:
    raise AssertionError(path)


def _seal(payload: Payload, folder: Path, gpu_code: Callable[[Path], GpuCode] = _no_gpu) -> Path:
    """Seal a raw wheel under the name that auditwheel would give it."""
    raw = pack(payload, folder / "raw")
    return seal(raw.rename(raw.with_name(_REPAIRED)), payload, folder / "dist", gpu_code=gpu_code)


def test_raw_wheel(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    payload = _payload(compiled_sample(simd=Simd.X86_64_V3), compiled_sample())
    path = pack(payload, tmp_path / "raw")
    assert path.name == _RAW
    with WheelFile(path) as wheel:
        assert wheel.namelist() == [
            f"{_ROOT}/{_PLACE}",
            f"{_ROOT}/torch2.7/sample/ds0.19.8/x86_64_v3/{_SO}",
            f"{_INFO}/METADATA",
            f"{_INFO}/WHEEL",
            f"{_INFO}/licenses/LICENSE",
            f"{_INFO}/RECORD",
        ]
        # WheelFile compares what it reads with RECORD.
        assert all(wheel.read(name) for name in wheel.namelist())
        assert wheel.read(f"{_INFO}/WHEEL").decode() == (
            "Wheel-Version: 1.0\nGenerator: dsops_builder\nRoot-Is-Purelib: false\n"
            "Tag: cp311-cp311-linux_x86_64\nBuild: 1\n"
        )
        metadata = Parser().parsestr(wheel.read(f"{_INFO}/METADATA").decode())
    assert dict(metadata.items()) == {
        "Metadata-Version": "2.4",
        "Name": "dsops-prebuilt-cu118",
        "Version": "0.1.0",
        "Summary": "DeepSpeed ops built ahead of time for cu118 and CPython 3.11",
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Classifier": "Operating System :: POSIX :: Linux",
        "Requires-Python": "==3.11.*",
        "Requires-Dist": "dsops-prebuilt==0.1.0",
        "Description-Content-Type": "text/plain",
    }
    assert (
        metadata.get_payload() == "Binaries for dsops-prebuilt: sample for torch 2.7.1. There is nothing to import.\n"
    )


def test_the_same_input_gives_the_same_bytes(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    first, second = (compiled_sample(simd=simd) for simd in (Simd.X86_64, Simd.X86_64_V3))
    one = _seal(_payload(first, second), tmp_path / "one")
    os.utime(first.path, (1, 1))
    first.path.chmod(0o600)
    before = os.umask(0o077)
    try:
        other = _seal(_payload(second, first), tmp_path / "other")
    finally:
        os.umask(before)
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes()


def test_the_clock_and_the_environment_date_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    path = write_wheel(tmp_path / _RAW, {"b.so": b"b", "a.txt": b"a"})
    with ZipFile(path) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        modes = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    assert modes == {"a.txt": 0o100644, "b.so": 0o100755, f"{_INFO}/RECORD": 0o100644}


def test_manifest_of_a_host_op(compiled_sample: CompiledSample, elf_samples: Path, tmp_path: Path) -> None:
    path = _seal(_payload(compiled_sample()), tmp_path)
    assert path == tmp_path / "dist" / _REPAIRED
    with WheelFile(path) as wheel:
        text = wheel.read(f"{_ROOT}/manifest.json").decode()
        tags = [line for line in wheel.read(f"{_INFO}/WHEEL").decode().splitlines() if line.startswith("Tag")]
        assert all(wheel.read(name) for name in wheel.namelist())
    assert tags == ["Tag: cp311-cp311-manylinux2014_x86_64", "Tag: cp311-cp311-manylinux_2_17_x86_64"]
    content = (elf_samples / "host.so").read_bytes()
    assert Manifest.from_json(text, "manifest.json") == Manifest(
        distribution="dsops-prebuilt-cu118",
        version="0.1.0",
        build=1,
        label="cu118",
        provenance=(("compiler", "gcc-10 10.2.1"),),
        artifacts=(
            Artifact(
                file=_PLACE,
                sha256=hashlib.sha256(content).hexdigest(),
                size=len(content),
                tier="stock",
                op="sample",
                accelerators=("cpu", "cuda"),
                module="deepspeed.ops.sample.sample_op",
                machine="x86_64",
                simd=Simd.X86_64,
                glibc=(2, 14),
                python="cp311",
                torch=TorchBinding(minor="2.7", exact=None, cxx11_abi=True, built_with="2.7.1+cu126"),
                cuda=None,
                sources=(
                    SourceDigest(
                        sha256="0" * 64, closure=("sample/sample.cpp", "includes/sample.h"), deepspeed=("0.19.8",)
                    ),
                ),
                defines=(),
                needed=("libtorch_cpu.so", "libc.so.6"),
            ),
        ),
    )


def test_gpu_code_of_a_cuda_op_is_what_the_file_holds(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    payload = _payload(compiled_sample("gpu.so", kernel="cuda"))
    asked: list[bytes] = []

    def gpu_code(path: Path) -> GpuCode:
        asked.append(path.read_bytes())
        return _CODE

    path = _seal(payload, tmp_path, gpu_code)
    with ZipFile(path) as archive:
        manifest = Manifest.from_json(archive.read(f"{_ROOT}/manifest.json").decode(), "manifest.json")
    assert manifest.artifacts[0].cuda == CudaBinding(toolkit=CudaRelease(11, 8), sass=_CODE.sass, ptx=_CODE.ptx)
    assert asked == [payload.compiled[0].path.read_bytes()]


def test_a_build_of_no_release_binds_to_its_exact_version(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    path = _seal(_payload(compiled_sample(torch="2.8.0a0")), tmp_path)
    with ZipFile(path) as archive:
        manifest = Manifest.from_json(archive.read(f"{_ROOT}/manifest.json").decode(), "manifest.json")
    torch = manifest.artifacts[0].torch
    assert torch is not None
    assert (torch.minor, torch.exact) == ("2.8", "2.8.0a0")


def test_releases_with_the_same_bytes_share_a_file(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    newer = replace(compiled_sample(deepspeed="0.19.10"), closure_sha256="1" * 64)
    same = compiled_sample(deepspeed="0.19.9")
    payload = _payload(newer, compiled_sample(), same, compiled_sample("avx512.so", deepspeed="0.19.11"))
    first, second = slots(payload)
    assert [first.file, second.file] == [_PLACE.replace("0.19.8", "0.19.11"), _PLACE]
    assert [item.target.deepspeed for item in second.compiled] == ["0.19.8", "0.19.9", "0.19.10"]
    with ZipFile(_seal(payload, tmp_path)) as archive:
        manifest = Manifest.from_json(archive.read(f"{_ROOT}/manifest.json").decode(), "manifest.json")
    assert [(source.sha256[0], source.deepspeed) for source in manifest.artifacts[1].sources] == [
        ("0", ("0.19.8", "0.19.9")),
        ("1", ("0.19.10",)),
    ]


def test_provenance_that_differs_between_ops_is_kept(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    other = replace(compiled_sample(simd=Simd.X86_64_V3), provenance=(("toolkit", "11.8.89"), ("compiler", "gcc-11")))
    with ZipFile(_seal(_payload(compiled_sample(), other), tmp_path)) as archive:
        manifest = Manifest.from_json(archive.read(f"{_ROOT}/manifest.json").decode(), "manifest.json")
    assert manifest.provenance == (("compiler", "gcc-10 10.2.1; gcc-11"), ("toolkit", "11.8.89"))


def test_two_patch_releases_of_one_torch_cannot_share_a_payload(compiled_sample: CompiledSample) -> None:
    payload = _payload(compiled_sample(), compiled_sample(torch="2.7.0"))
    with pytest.raises(MatrixError) as caught:
        slots(payload)
    assert str(caught.value) == (
        "1_cu118/torch2.7.0/cp311/sample/ds0.19.8/x86_64 and 1_cu118/torch2.7.1/cp311/sample/ds0.19.8/x86_64 would both "
        f"be {_PLACE}: an artifact binds to torch's minor release, so a row can have one pairing of each"
    )


def test_ops_of_two_pythons_cannot_share_a_payload(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    payload = _payload(compiled_sample(), compiled_sample(python="3.12"))
    with pytest.raises(MatrixError, match=r"^a payload is made of one row and one Python, not of \["):
        pack(payload, tmp_path)


def test_a_payload_of_nothing() -> None:
    with pytest.raises(MatrixError, match=r"^a payload is made of one row and one Python, not of nothing$"):
        slots(_payload())


def test_a_cuda_op_needs_a_toolkit(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    payload = _payload(compiled_sample("gpu.so", kernel="cuda", toolkit=None))
    with pytest.raises(MatrixError, match=r"/x86_64: a cuda kernel on a row without a toolkit$"):
        _seal(payload, tmp_path)


def test_a_file_that_the_repair_lost(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    raw = pack(_payload(compiled_sample()), tmp_path)
    more = _payload(compiled_sample(), compiled_sample(simd=Simd.X86_64_V3))
    with pytest.raises(
        GateError, match=r"x86_64_v3/sample_op\.cpython-311-x86_64-linux-gnu\.so was lost in the repair$"
    ):
        seal(raw, more, tmp_path / "dist", gpu_code=_no_gpu)
    assert not (tmp_path / "dist").exists()


def test_order_of_the_archive() -> None:
    names = ["x-1.dist-info/RECORD", "z.so", "x-1.dist-info/WHEEL", "a/RECORD", "x-1.dist-info/licenses/A"]
    assert archive_order(names) == [
        "a/RECORD",
        "z.so",
        "x-1.dist-info/WHEEL",
        "x-1.dist-info/licenses/A",
        "x-1.dist-info/RECORD",
    ]


def test_a_slot_says_what_it_stands_for(compiled_sample: CompiledSample) -> None:
    compiled = compiled_sample()
    assert slots(_payload(compiled)) == (Slot(file=_PLACE, compiled=(compiled,)),)
