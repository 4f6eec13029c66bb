"""What auditwheel proves of packed samples, and how repair.py runs it."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from dsops_builder.errors import GateError
from dsops_builder.model import Compiled
from dsops_builder.repair import newest_tag, prove, repair
from dsops_builder.wheel import Payload, pack

CompiledSample = Callable[..., Compiled]


def _wheel(compiled: Compiled, folder: Path) -> Path:
    return pack(Payload(version="0.1.0", compiled=(compiled,)), folder / "raw")


def _retag(command: Sequence[str]) -> str:
    """What ``auditwheel repair`` leaves: the wheel under another name in the folder behind --wheel-dir."""
    folder, wheel = Path(command[command.index("--wheel-dir") + 1]), Path(command[-1])
    shutil.copyfile(wheel, folder / wheel.name.replace("linux_x86_64", "manylinux_2_17_x86_64"))
    return ""


def test_proof_of_an_honest_wheel(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    proof = prove(_wheel(compiled_sample(), tmp_path))
    assert proof.tags[:2] == ("manylinux_2_17_x86_64", "manylinux2014_x86_64")
    assert newest_tag("x86_64") in proof.tags
    assert "manylinux_2_12_x86_64" not in proof.tags
    assert (proof.beyond, proof.foreign, proof.obstacles) == ((), (), "")


def test_symbol_versions_that_force_a_newer_tag_are_named(
    compiled_sample: CompiledSample, elf_samples: Path, tmp_path: Path
) -> None:
    newer = (elf_samples / "host.so").read_bytes().replace(b"GLIBC_2.14", b"GLIBC_2.34")
    proof = prove(_wheel(compiled_sample(newer), tmp_path))
    assert proof.tags[0] == "manylinux_2_34_x86_64"
    assert proof.obstacles == "libc.so.6 GLIBC_2.34"


def test_a_library_that_no_policy_has_is_named(
    compiled_sample: CompiledSample, elf_samples: Path, tmp_path: Path
) -> None:
    foreign = (elf_samples / "host.so").read_bytes().replace(b"libtorch_cpu.so", b"libforeign12.so")
    proof = prove(_wheel(compiled_sample(foreign), tmp_path))
    assert proof.tags == ()
    assert proof.obstacles == "libforeign12.so, which the tag does not allow"


def test_a_wheel_without_a_file_for_this_machine(compiled_sample: CompiledSample, tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"\.whl: auditwheel cannot read it: This does not look like a platform wheel"):
        prove(_wheel(compiled_sample(b"no ELF"), tmp_path))


def test_a_path_that_comes_again_with_other_contents_is_read_again(
    compiled_sample: CompiledSample, elf_samples: Path, tmp_path: Path
) -> None:
    newer = (elf_samples / "host.so").read_bytes().replace(b"GLIBC_2.14", b"GLIBC_2.34")
    first = _wheel(compiled_sample(newer), tmp_path)
    assert prove(first).obstacles
    assert _wheel(compiled_sample(), tmp_path) == first
    assert not prove(first).obstacles


def test_repair_runs_auditwheel(compiled_sample: CompiledSample, fake_runner: Any, tmp_path: Path) -> None:
    runner = fake_runner(_retag)
    raw = _wheel(compiled_sample(), tmp_path)
    environment = {"PATH": "/usr/bin", "AUDITWHEEL_PLAT": "manylinux1_x86_64", "HOME": "/home/u"}
    repaired = repair(raw, into=tmp_path / "repaired", runner=runner, environment=environment)
    assert repaired.name == "dsops_prebuilt_cu118-0.1.0-1-cp311-cp311-manylinux_2_17_x86_64.whl"
    ((command, env),) = runner.commands
    assert command[:4] == [sys.executable, "-m", "auditwheel", "repair"]
    assert command[-3:] == ["--wheel-dir", str(tmp_path / "repaired"), str(raw)]
    excluded = [word for before, word in pairwise(command) if before == "--exclude"]
    assert {"libc10*.so", "libtorch*.so", "libcudart.so.*"} <= set(excluded)
    assert not any("gomp" in pattern for pattern in excluded)
    assert env == {"PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}/usr/bin", "HOME": "/home/u"}


def test_too_new_a_wheel_is_refused_before_auditwheel_runs(
    compiled_sample: CompiledSample, elf_samples: Path, fake_runner: Any, tmp_path: Path
) -> None:
    runner = fake_runner(_retag)
    newer = (elf_samples / "host.so").read_bytes().replace(b"GLIBC_2.14", b"GLIBC_2.34")
    with pytest.raises(GateError) as caught:
        repair(_wheel(compiled_sample(newer), tmp_path), into=tmp_path / "repaired", runner=runner, environment={})
    assert str(caught.value) == (
        "dsops_prebuilt_cu118-0.1.0-1-cp311-cp311-linux_x86_64.whl: tag: found manylinux_2_34_x86_64, because of "
        "libc.so.6 GLIBC_2.34; wanted manylinux_2_28_x86_64 or older"
    )
    assert runner.commands == []


def test_no_wheel_came_out(compiled_sample: CompiledSample, fake_runner: Any, tmp_path: Path) -> None:
    raw = _wheel(compiled_sample(), tmp_path)
    with pytest.raises(GateError, match=r"auditwheel repair wrote 0 wheels into .*, wanted one$"):
        repair(raw, into=tmp_path / "repaired", runner=fake_runner(lambda _: ""), environment={})


def test_a_library_that_was_copied_in(compiled_sample: CompiledSample, fake_runner: Any, tmp_path: Path) -> None:
    def graft(command: Sequence[str]) -> str:
        _retag(command)
        (made,) = Path(command[command.index("--wheel-dir") + 1]).glob("*.whl")
        with ZipFile(made, "a") as archive:
            archive.writestr("dsops_prebuilt_cu118.libs/libgomp-0123abcd.so.1", b"")
        return ""

    raw = _wheel(compiled_sample(), tmp_path)
    with pytest.raises(GateError, match=r"auditwheel copied in dsops_prebuilt_cu118\.libs/libgomp-0123abcd\.so\.1; wa"):
        repair(raw, into=tmp_path / "repaired", runner=fake_runner(graft), environment={})
