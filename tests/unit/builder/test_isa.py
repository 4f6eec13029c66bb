"""Levels of single instructions, planted into a sample's code, and the proof about zmm and mask registers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from iced_x86 import Code, CpuidFeature, EncodingKind, Instruction, OpCodeInfo, OpCodeOperandKind

from dsops_builder.errors import GateError
from dsops_builder.isa import Instructions, Use, read_instructions
from dsops_prebuilt._variant import Simd


def _plant(samples: Path, folder: Path, code: bytes) -> Path:
    """host.so with ``code`` at the start of its only function; nops fill the rest of the section."""
    content = bytearray((samples / "host.so").read_bytes())
    with (samples / "host.so").open("rb") as stream:
        text = ELFFile(stream).get_section_by_name(".text")
        assert text is not None
        offset, size = text["sh_offset"], text["sh_size"]
    content[offset : offset + size] = code.ljust(size, b"\x90")
    path = folder / "planted.so"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("code", "level"),
    [
        pytest.param("f30f1efa", Simd.X86_64, id="endbr64"),
        pytest.param("f3480f1ec8", Simd.X86_64, id="rdsspq"),
        pytest.param("f30fbcc0", Simd.X86_64, id="tzcnt, which is rep bsf"),
        pytest.param("0f58c1", Simd.X86_64, id="addps"),
        pytest.param("0f05", Simd.X86_64, id="syscall"),
        pytest.param("f390", Simd.X86_64, id="pause"),
        pytest.param("9e", Simd.X86_64_V3, id="sahf"),
        pytest.param("f30fb8c0", Simd.X86_64_V3, id="popcnt, of v2"),
        pytest.param("660f3a0cc100", Simd.X86_64_V3, id="blendps, of v2"),
        pytest.param("f30fbdc0", Simd.X86_64_V3, id="lzcnt"),
        pytest.param("c5f458c2", Simd.X86_64_V3, id="vaddps ymm"),
        pytest.param("c4e2f5b8c2", Simd.X86_64_V3, id="vfmadd231pd ymm"),
        pytest.param("c4e27d13c1", Simd.X86_64_V3, id="vcvtph2ps ymm"),
        pytest.param("0f01d0", Simd.X86_64_V3, id="xgetbv"),
        pytest.param("62f16c4858d9", Simd.X86_64_V4, id="vaddps zmm"),
        pytest.param("62f16c2858d9", Simd.X86_64_V4, id="vaddps ymm, EVEX"),
        pytest.param("c5f892c8", Simd.X86_64_V4, id="kmovw"),
        pytest.param("62f2754850c2", None, id="vpdpbusd zmm, VNNI"),
        pytest.param("0fc7f0", None, id="rdrand"),
    ],
)
def test_level(elf_samples: Path, tmp_path: Path, code: str, level: Simd | None) -> None:
    found = read_instructions(_plant(elf_samples, tmp_path, bytes.fromhex(code)))
    assert (found.level, found.undecodable) == (level, ())


def test_the_first_offender_is_named_with_its_function(elf_samples: Path) -> None:
    found = read_instructions(elf_samples / "avx512.so")
    assert found.level is Simd.X86_64_V4
    (use,) = found.above(Simd.X86_64_V3)
    assert (use.feature, use.symbol, use.text) == ("AVX512F", "wide", "vaddps zmm3,zmm2,zmm1")
    assert str(use) == f"vaddps zmm3,zmm2,zmm1 at {use.address:#x} in wide (AVX512F)"
    assert found.above(Simd.X86_64_V4) == ()


def test_a_function_without_a_name() -> None:
    assert str(Use(feature="AVX", address=16, symbol=None, text="vzeroupper")) == "vzeroupper at 0x10 (AVX)"


def test_bytes_that_are_no_instruction(elf_samples: Path, tmp_path: Path) -> None:
    found = read_instructions(_plant(elf_samples, tmp_path, b"\x90\x06"))
    assert len(found.undecodable) == 1


def test_code_is_found_without_section_headers(elf_samples: Path, tmp_path: Path) -> None:
    content = bytearray((elf_samples / "avx512.so").read_bytes())
    struct.pack_into("<Q", content, 40, 0)  # e_shoff
    struct.pack_into("<HHH", content, 58, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    path = tmp_path / "stripped.so"
    path.write_bytes(content)
    # The segment holds tables too, so that more than the code is decoded: the level can only come out higher.
    assert "AVX512F" in {use.feature for use in read_instructions(path).uses}


def test_a_file_without_code_is_refused(elf_samples: Path) -> None:
    with pytest.raises(GateError, match=r"^libtorch_cpu\.so: no executable code found$"):
        read_instructions(elf_samples / "libtorch_cpu.so")


def test_another_machine_is_refused(elf_samples: Path, tmp_path: Path) -> None:
    content = bytearray((elf_samples / "host.so").read_bytes())
    struct.pack_into("<H", content, 18, 183)
    path = tmp_path / "arm.so"
    path.write_bytes(content)
    with pytest.raises(
        GateError, match=r"^arm\.so: not a readable .*: its instructions are not x86-64's but those of EM_AARCH64$"
    ):
        read_instructions(path)


def test_every_instruction_with_a_zmm_or_mask_register_is_above_v3() -> None:
    names = {number: name for name, number in vars(CpuidFeature).items() if name.isupper()}
    kinds = {number: name for name, number in vars(OpCodeOperandKind).items() if name.isupper()}
    seen = 0
    codes: list[Any] = [number for number in vars(Code).values() if isinstance(number, int)]
    for code in codes:
        form = OpCodeInfo(code)
        operands = [kinds[kind] for kind in form.op_kinds()]
        if form.encoding != EncodingKind.EVEX and not any("ZMM" in kind or kind.startswith("K_") for kind in operands):
            continue
        seen += 1
        instruction = Instruction()
        instruction.code = code
        uses = tuple(Use(feature=names[f], address=0, symbol=None, text="") for f in instruction.cpuid_features())
        assert Instructions(count=1, uses=uses, undecodable=()).above(Simd.X86_64_V3), form.instruction_string
    assert seen > 1000
