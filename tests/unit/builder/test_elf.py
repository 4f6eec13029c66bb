"""What elf.py reads of the samples, of damaged files and of this interpreter's own extension modules."""

from __future__ import annotations

import shutil
import struct
import sysconfig
from pathlib import Path

import pytest

from dsops_builder.elf import Elf, read_elf, unresolved
from dsops_builder.errors import GateError

_E_MACHINE = 18  # offset of e_machine in the ELF header (gABI, "ELF Header")


def test_facts_of_an_extension_module(elf_samples: Path) -> None:
    assert read_elf(elf_samples / "host.so") == Elf(
        machine="x86_64",
        needed=("libtorch_cpu.so", "libc.so.6"),
        soname=None,
        search_paths=(),
        versions=(("libc.so.6", ("GLIBC_2.14",)),),
        unversioned=("GOMP_barrier", "PyModule_Create2", "c10_sample"),
        defined=frozenset({"PyInit_sample_op"}),
        gpu_code=False,
    )


def test_facts_of_a_library_without_versions(elf_samples: Path) -> None:
    elf = read_elf(elf_samples / "libc10.so")
    assert (elf.soname, elf.versions, elf.defined) == ("libc10.so", (), frozenset({"c10_sample"}))


def test_search_path_and_gpu_code_are_seen(elf_samples: Path) -> None:
    assert read_elf(elf_samples / "faulty.so").search_paths == ("/build/lib",)
    assert read_elf(elf_samples / "gpu.so").gpu_code


def test_newest_version_is_by_number_not_by_letter(elf_samples: Path) -> None:
    elf = read_elf(elf_samples / "host.so")
    assert elf.newest("GLIBC") == (2, 14)
    assert elf.newest("GLIBCXX") is None
    several = Elf(
        machine="x86_64",
        needed=(),
        soname=None,
        search_paths=(),
        versions=(("libc.so.6", ("GLIBC_2.14", "GLIBC_2.2.5", "GLIBC_PRIVATE")), ("libm.so.6", ("GLIBC_2.9",))),
        unversioned=(),
        defined=frozenset(),
        gpu_code=False,
    )
    assert several.newest("GLIBC") == (2, 14)


@pytest.mark.parametrize(
    ("number", "name"), [(183, "aarch64"), (3, "EM_386, 64-bit"), (243, "EM_RISCV, 64-bit")], ids=str
)
def test_other_machines_are_named(elf_samples: Path, tmp_path: Path, number: int, name: str) -> None:
    content = bytearray((elf_samples / "host.so").read_bytes())
    struct.pack_into("<H", content, _E_MACHINE, number)
    path = tmp_path / "other.so"
    path.write_bytes(content)
    assert read_elf(path).machine == name


def test_this_interpreter_s_extension_modules() -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = sorted(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob(f"*{suffix}"))
    for module in modules[:5]:
        assert f"PyInit_{module.name.removesuffix(suffix)}" in read_elf(module).defined


def test_no_elf(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("text")
    with pytest.raises(GateError, match=r"^text\.so: not a readable ELF file: "):
        read_elf(path)


def test_a_damaged_file_is_a_gate_error_or_read(elf_samples: Path, tmp_path: Path) -> None:
    content = (elf_samples / "host.so").read_bytes()
    path = tmp_path / "damaged.so"
    outcomes = set()
    for place in range(0, len(content), 23):
        for damaged in (content[:place], content[:place] + b"\xff\xff\xff" + content[place + 3 :]):
            path.write_bytes(damaged)
            try:
                read_elf(path)
            except GateError:
                outcomes.add("refused")
            else:
                outcomes.add("read")
    assert outcomes == {"refused", "read"}


def test_a_file_without_section_headers_is_refused(elf_samples: Path, tmp_path: Path) -> None:
    content = bytearray((elf_samples / "host.so").read_bytes())
    struct.pack_into("<Q", content, 40, 0)  # e_shoff
    struct.pack_into("<HHH", content, 58, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    path = tmp_path / "stripped.so"
    path.write_bytes(content)
    with pytest.raises(GateError, match=r"^stripped\.so: not a readable ELF file: no dynamic s"):
        read_elf(path)


def test_symbols_are_found_through_the_libraries_that_are_needed(elf_samples: Path) -> None:
    elf = read_elf(elf_samples / "host.so")
    assert unresolved(elf, elf_samples) == ("GOMP_barrier", "PyModule_Create2")


def test_a_library_that_nothing_needs_does_not_count(elf_samples: Path, tmp_path: Path) -> None:
    shutil.copyfile(elf_samples / "libc10.so", tmp_path / "libc10.so")
    elf = read_elf(elf_samples / "host.so")
    assert unresolved(elf, tmp_path) == ("GOMP_barrier", "PyModule_Create2", "c10_sample")


def test_a_library_that_cannot_be_read(elf_samples: Path, tmp_path: Path) -> None:
    (tmp_path / "libtorch_cpu.so").write_text("text")
    with pytest.raises(GateError, match=r"libtorch_cpu\.so: not a readable ELF file"):
        unresolved(read_elf(elf_samples / "host.so"), tmp_path)
