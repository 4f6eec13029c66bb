"""The emulators are the two that are wanted, new enough, or there are none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.emulator import Emulator, set_up_emulator
from dsops_builder.errors import ToolchainError
from dsops_builder.fetch import DebianMirror
from dsops_builder.model import Package

MakeRunner = Callable[[Callable[[Sequence[str]], str]], Any]
PATH = "pool/main/q/qemu/qemu-user-static_7.2_amd64.deb"
PACKAGE = Package(path=PATH, sha256=hashlib.sha256(b"").hexdigest())
GOOD = "qemu-x86_64 version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022 ...\n"
BOTH = ("qemu-x86_64-static", "qemu-aarch64-static")


@dataclass
class Machine:
    """Unpacks a package of these programs, all of which print the same."""

    programs: Sequence[str] = (*BOTH, "qemu-riscv64-static")
    printed: str = GOOD
    unpacked: int = 0

    def __call__(self, command: Sequence[str]) -> str:
        if command[0] != "dpkg-deb":
            return self.printed
        self.unpacked += 1
        folder = Path(command[-1]) / "usr/bin"
        folder.mkdir(parents=True)
        for name in self.programs:
            (folder / name).touch()
        return ""


@pytest.fixture
def set_up(tmp_path: Path, fake_runner: MakeRunner) -> Callable[[Machine], Emulator]:
    """Sets up the emulators on a machine that has the package."""
    cached = tmp_path / "debian" / f"{PACKAGE.sha256[:12]}-{Path(PATH).name}"
    cached.parent.mkdir()
    cached.touch()

    def run(machine: Machine) -> Emulator:
        runner = fake_runner(machine)
        return set_up_emulator(PACKAGE, DebianMirror("", tmp_path, runner), tmp_path, runner)

    return run


def test_only_the_two_are_kept_and_unpacked_once(set_up: Callable[[Machine], Emulator]) -> None:
    machine = Machine()
    first, second = set_up(machine), set_up(machine)
    assert first == second
    assert {path.name for path in first.folder.iterdir()} == set(BOTH)
    assert machine.unpacked == 1


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine(programs=BOTH[:1]), f"{PATH} has no usr/bin/qemu-aarch64-static"),
        (
            Machine(printed="qemu-x86_64 version 5.2.0\n"),
            f"{PATH}: qemu-x86_64-static is version 5.2; AVX2 needs 7.2 or newer",
        ),
        (Machine(printed="?"), f"{PATH}: qemu-x86_64-static is '?'; AVX2 needs 7.2 or newer"),
    ],
    ids=["one is missing", "an old release", "no qemu"],
)
def test_another_package_is_refused_and_leaves_nothing(
    set_up: Callable[[Machine], Emulator], tmp_path: Path, machine: Machine, message: str
) -> None:
    with pytest.raises(ToolchainError) as refusal:
        set_up(machine)
    assert str(refusal.value) == message
    assert list((tmp_path / "emulator").iterdir()) == []


def test_a_program_runs_as_a_processor_with_its_own_libraries_or_this_machines() -> None:
    emulator = Emulator(folder=Path("/e"))
    assert emulator.command("x86_64", "Haswell") == ("/e/qemu-x86_64-static", "-cpu", "Haswell")
    assert emulator.command("aarch64", "cortex-a57", Path("/root-of-aarch64")) == (
        "/e/qemu-aarch64-static",
        "-cpu",
        "cortex-a57",
        "-L",
        "/root-of-aarch64",
    )
