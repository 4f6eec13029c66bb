"""Find the SIMD level that the instructions of an ELF need, and the first instruction above a level."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.constants import P_FLAGS, SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from iced_x86 import CpuidFeature, Decoder, Instruction, Mnemonic

from dsops_builder.elf import open_elf
from dsops_builder.errors import GateError
from dsops_prebuilt._variant import Simd

_NAMES = {number: name for name, number in vars(CpuidFeature).items() if name.isupper()}

# What every x86-64 processor has (x86-64 psABI, table 3.1, baseline column, in iced-x86's finer words).
# CET is in: endbr64 and rdsspq are encoded in the space of multi-byte nops and do nothing on processors without it
# (Intel SDM volume 1, chapter 17).
_BASELINE = frozenset(
    re.findall(
        r"\w+",
        "INTEL8086 INTEL186 INTEL286 INTEL386 INTEL486 X64 CPUID TSC PAUSE MULTIBYTENOP FPU FPU287 FPU387 CMOV CX8 "
        "FXSR MMX SSE SSE2 SYSCALL CET_IBT CET_SS",
    )
)
# There is no artifact of level v2: what the psABI lists there is allowed from v3 on. XSAVE is the psABI's OSXSAVE.
_V3 = _BASELINE | frozenset(
    re.findall(
        r"\w+",
        "CMPXCHG16B LAHF_SAHF POPCNT SSE3 SSE4_1 SSE4_2 SSSE3 AVX AVX2 BMI1 BMI2 F16C FMA LZCNT MOVBE XSAVE",
    )
)
_V4 = _V3 | {"AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL"}
_LEVELS = {Simd.X86_64: _BASELINE, Simd.X86_64_V3: _V3, Simd.X86_64_V4: _V4}

# iced-x86 tells features by encoding; these depend on more than that.
_BY_MNEMONIC = {
    # tzcnt is "rep bsf": older processors ignore the prefix, and the two agree wherever the operand is not 0.
    # gcc writes it for every level, because __builtin_ctz(0) is undefined (gcc/config/i386/i386.md, "*ctz<mode>2").
    Mnemonic.TZCNT: frozenset[str](),
    # Part of the 8086, but the first x86-64 processors had them in 32-bit mode only.
    Mnemonic.LAHF: frozenset({"LAHF_SAHF"}),
    Mnemonic.SAHF: frozenset({"LAHF_SAHF"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """The first instruction that needs a feature. ``symbol`` is None in a stripped function that is not exported."""

    feature: str
    address: int
    symbol: str | None
    text: str

    def __str__(self) -> str:
        inside = f" in {self.symbol}" if self.symbol else ""
        return f"{self.text} at {self.address:#x}{inside} ({self.feature})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instructions:
    """What the code of one ELF needs of a processor. ``undecodable`` has the addresses of bytes that are no code."""

    count: int
    uses: tuple[Use, ...]
    undecodable: tuple[int, ...]

    @property
    def level(self) -> Simd | None:
        """The lowest level that has every feature; None when no level has."""
        return next((level for level in _LEVELS if not self.above(level)), None)

    def above(self, level: Simd) -> tuple[Use, ...]:
        """The uses that ``level`` does not cover, by address."""
        return tuple(use for use in self.uses if use.feature not in _LEVELS[level])


def read_instructions(path: Path) -> Instructions:
    """Decode every executable section of an x86-64 ELF.

    zmm and mask registers need no look of their own: each instruction that can name one needs an AVX-512 feature.
    Raises :class:`GateError` when ``path`` is no x86-64 ELF, or has no executable byte.
    """
    with open_elf(path) as elf:
        if elf["e_machine"] != "EM_X86_64" or elf.elfclass != 64:  # noqa: PLR2004  the word size itself
            raise GateError(f"its instructions are not x86-64's but those of {elf['e_machine']}")
        code = sorted(_executable(elf))
        functions = _functions(elf)
    if not any(content for _, content in code):
        # Else a file whose headers hide its code would pass as one that needs nothing.
        raise GateError(f"{path.name}: no executable code found")
    return _scan(code, functions)


def _executable(elf: ELFFile) -> Iterator[tuple[int, bytes]]:
    """Address and bytes of the executable sections, or of the segments where the section headers are gone."""
    if elf.num_sections():
        for section in elf.iter_sections("SHT_PROGBITS"):
            if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR:
                yield section["sh_addr"], section.data()
    else:
        for segment in elf.iter_segments("PT_LOAD"):
            if segment["p_flags"] & P_FLAGS.PF_X:
                yield segment["p_vaddr"], segment.data()


def _functions(elf: ELFFile) -> list[tuple[int, int, str]]:
    """Address, end and name of every named function, by address."""
    tables = (elf.get_section_by_name(name) for name in (".symtab", ".dynsym"))
    return sorted(
        (symbol["st_value"], symbol["st_value"] + symbol["st_size"], symbol.name)
        for table in tables
        if isinstance(table, SymbolTableSection)
        for symbol in table.iter_symbols()
        if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_value"]
    )


def _scan(code: list[tuple[int, bytes]], functions: list[tuple[int, int, str]]) -> Instructions:
    first: dict[str, Use] = {}
    undecodable: list[int] = []
    count = 0
    # Features belong to the instruction's form, not to the instruction: iced-x86 is asked once for each form.
    seen: set[int] = set()
    for address, content in code:
        for instruction in Decoder(64, content, ip=address):
            count += 1
            if instruction.code in seen:
                continue
            if instruction.is_invalid:
                undecodable.append(instruction.ip)
                continue
            seen.add(instruction.code)
            for feature in _features(instruction):
                if feature not in first:
                    owner = _owner(instruction.ip, functions)
                    first[feature] = Use(feature=feature, address=instruction.ip, symbol=owner, text=str(instruction))
    uses = tuple(sorted(first.values(), key=lambda use: (use.address, use.feature)))
    return Instructions(count=count, uses=uses, undecodable=tuple(undecodable))


def _features(instruction: Instruction) -> frozenset[str]:
    special = _BY_MNEMONIC.get(instruction.mnemonic)
    return frozenset(_NAMES[feature] for feature in instruction.cpuid_features()) if special is None else special


def _owner(address: int, functions: list[tuple[int, int, str]]) -> str | None:
    place = bisect.bisect_right(functions, address, key=lambda function: function[0]) - 1
    return functions[place][2] if place >= 0 and address < functions[place][1] else None
