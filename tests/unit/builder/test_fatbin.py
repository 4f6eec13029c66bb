"""What fatbin.py makes of cuobjdump's output, as releases 11.8 to 13.x print it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.errors import CommandError, GateError
from dsops_builder.fatbin import GpuCode, asked_for, read_gpu_code
from dsops_prebuilt._variant import GpuArch

_FILE = Path("op.so")
_TOOL = Path("/cuda/bin/cuobjdump")
_ELF = """\
ELF file    1: fused_adam_op.cpython-311-x86_64-linux-gnu.1.sm_90.cubin
ELF file    2: fused_adam_op.cpython-311-x86_64-linux-gnu.2.sm_80.cubin
ELF file    3: fused_adam_op.cpython-311-x86_64-linux-gnu.3.sm_90a.cubin
ELF file    4: fused_adam_op.cpython-311-x86_64-linux-gnu.4.sm_120.cubin
ELF file    5: fused_adam_op.cpython-311-x86_64-linux-gnu.5.sm_80.cubin
"""
_PTX = "PTX file    1: fused_adam_op.cpython-311-x86_64-linux-gnu.1.sm_120.ptx\n"


def _printing(elf: str, ptx: str) -> Callable[[Sequence[str]], str]:
    return lambda command: {"--list-elf": elf, "--list-ptx": ptx}[command[1]]


def test_each_architecture_once_in_order(fake_runner: Any) -> None:
    runner = fake_runner(_printing(_ELF, _PTX))
    code = read_gpu_code(_FILE, _TOOL, runner)
    assert code == GpuCode(
        sass=(GpuArch(8, 0), GpuArch(9, 0), GpuArch(9, 0, "a"), GpuArch(12, 0)), ptx=(GpuArch(12, 0),)
    )
    assert str(code) == "SASS 8.0 9.0 9.0a 12.0, PTX 12.0"
    assert [command for command, _ in runner.commands] == [
        ["/cuda/bin/cuobjdump", "--list-elf", "op.so"],
        ["/cuda/bin/cuobjdump", "--list-ptx", "op.so"],
    ]


def test_other_lines_are_passed_over_and_an_empty_list_is_none(fake_runner: Any) -> None:
    runner = fake_runner(_printing("cuobjdump info    : something\n" + _ELF, ""))
    code = read_gpu_code(_FILE, _TOOL, runner)
    assert code.ptx == ()
    assert str(code) == "SASS 8.0 9.0 9.0a 12.0, PTX none"


def test_an_entry_that_cannot_be_read(fake_runner: Any) -> None:
    runner = fake_runner(_printing("ELF file    1: op.1.sm_90x.cubin\n", ""))
    with pytest.raises(GateError, match=r"^op\.so: cuobjdump lists 'ELF file    1: op\.1\.sm_90x\.cubin', whose "):
        read_gpu_code(_FILE, _TOOL, runner)


def test_a_file_without_gpu_code(fake_runner: Any) -> None:
    def fail(command: Sequence[str]) -> str:
        raise CommandError(
            f"exit code 255 from {command}\ncuobjdump info    : File 'op.so' does not contain device code"
        )

    with pytest.raises(GateError, match=r"^op\.so: no GPU code in it$"):
        read_gpu_code(_FILE, _TOOL, fake_runner(fail))


def test_cuobjdump_is_not_there(fake_runner: Any) -> None:
    def fail(command: Sequence[str]) -> str:
        raise CommandError(f"{command[0]}: cannot be started")

    with pytest.raises(CommandError, match=r"^/cuda/bin/cuobjdump: cannot be started$"):
        read_gpu_code(_FILE, _TOOL, fake_runner(fail))


def test_what_an_arch_list_asks_for() -> None:
    archs = tuple(GpuArch.parse(text) for text in ("9.0a", "8.0", "9.0+PTX"))
    assert asked_for(archs) == GpuCode(sass=(GpuArch(8, 0), GpuArch(9, 0), GpuArch(9, 0, "a")), ptx=(GpuArch(9, 0),))
