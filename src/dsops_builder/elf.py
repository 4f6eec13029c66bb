"""Read the facts of an ELF that decide where it may be loaded: machine, libraries, symbols, versions, search paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.hash import ELFHashSection, GNUHashSection
from elftools.elf.sections import Symbol, SymbolTableSection

from dsops_builder.errors import GateError

_MACHINES = {("EM_X86_64", 64): "x86_64", ("EM_AARCH64", 64): "aarch64"}
# Index 0 is "local", 1 is "global without a version" (gABI supplement "Symbol Versioning", VERSYM); 0x8000 hides.
_LAST_UNVERSIONED = 1
_INDEX = 0x7FFF
# pyelftools leaves a damaged table with whichever of these its parsing ran into.
_DAMAGED = (AttributeError, TypeError, AssertionError, ArithmeticError, MemoryError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elf:
    """What one shared object says of itself.

    ``machine`` is ``platform.machine()`` of its processors, or the ELF name of the machine where there is no such
    word; ``search_paths`` are the entries of DT_RPATH and DT_RUNPATH; ``versions`` has the symbol versions asked of
    each library; ``unversioned`` are the undefined, non-weak symbols bound to no version, which the dynamic loader
    takes from whichever library has them; ``gpu_code`` says whether nvcc put a fat binary in.
    """

    machine: str
    needed: tuple[str, ...]
    soname: str | None
    search_paths: tuple[str, ...]
    versions: tuple[tuple[str, tuple[str, ...]], ...]
    unversioned: tuple[str, ...]
    defined: frozenset[str]
    gpu_code: bool

    def newest(self, family: str) -> tuple[int, ...] | None:
        """The newest version of ``GLIBC``, ``GLIBCXX`` or ``CXXABI`` asked for, as in ``(2, 17)``; None for none."""
        pattern = re.compile(rf"{family}_(\d+(?:\.\d+)*)")
        found = (pattern.fullmatch(version) for _, versions in self.versions for version in versions)
        return max((tuple(int(part) for part in match[1].split(".")) for match in found if match), default=None)


@contextmanager
def open_elf(path: Path) -> Iterator[ELFFile]:
    """Open ``path``; raises :class:`GateError` when it is no ELF, or its tables cannot be followed in the block."""
    try:
        with path.open("rb") as stream:
            yield ELFFile(stream)
    except (GateError, ELFError, OSError, ValueError, LookupError, *_DAMAGED) as error:
        raise GateError(f"{path.name}: not a readable ELF file: {error}") from error


def read_elf(path: Path) -> Elf:
    """Read ``path``. Raises :class:`GateError` when it is no ELF or its tables cannot be followed."""
    with open_elf(path) as elf:
        return _read(elf)


def _read(elf: ELFFile) -> Elf:
    symbols = _dynamic_symbols(elf)
    paths = _dynamic(elf, "DT_RPATH") + _dynamic(elf, "DT_RUNPATH")
    return Elf(
        machine=_MACHINES.get((elf["e_machine"], elf.elfclass), f"{elf['e_machine']}, {elf.elfclass}-bit"),
        needed=_dynamic(elf, "DT_NEEDED"),
        soname=next(iter(_dynamic(elf, "DT_SONAME")), None),
        search_paths=tuple(part for path in paths for part in path.split(":")),
        versions=_versions(elf),
        unversioned=tuple(sorted(symbol.name for symbol, versioned in symbols if not versioned and _binds(symbol))),
        defined=frozenset(symbol.name for symbol, _ in symbols if symbol.name and not _undefined(symbol)),
        gpu_code=elf.get_section_by_name(".nv_fatbin") is not None,
    )


def _dynamic(elf: ELFFile, kind: str) -> tuple[str, ...]:
    """The strings that the dynamic section's tags of one kind point to."""
    section = elf.get_section_by_name(".dynamic")
    if not isinstance(section, DynamicSection):
        # Without section headers everything would read as "needs nothing", and pass every gate.
        raise GateError("no dynamic section in the section headers")
    # pyelftools sets an attribute named after the tag: tag.needed for DT_NEEDED.
    return tuple(str(getattr(tag, kind.removeprefix("DT_").lower())) for tag in section.iter_tags(kind))


def _undefined(symbol: Symbol) -> bool:
    return bool(symbol["st_shndx"] == "SHN_UNDEF")


def _binds(symbol: Symbol) -> bool:
    return bool(symbol.name) and _undefined(symbol) and symbol["st_info"]["bind"] != "STB_WEAK"


def _dynamic_symbols(elf: ELFFile) -> list[tuple[Symbol, bool]]:
    """Each dynamic symbol, and whether it is bound to a version."""
    table = elf.get_section_by_name(".dynsym")
    if not isinstance(table, SymbolTableSection):
        raise GateError("no dynamic symbols in the section headers")
    versions = elf.get_section_by_name(".gnu.version")
    if not isinstance(versions, GNUVerSymSection):
        return [(symbol, False) for symbol in table.iter_symbols()]
    indexes = (versions.get_symbol(number)["ndx"] for number in range(table.num_symbols()))
    # pyelftools gives names, not numbers, for indexes 0 and 1 (VER_NDX_LOCAL, VER_NDX_GLOBAL).
    return [
        (symbol, isinstance(index, int) and index & _INDEX > _LAST_UNVERSIONED)
        for symbol, index in zip(table.iter_symbols(), indexes, strict=True)
    ]


def _versions(elf: ELFFile) -> tuple[tuple[str, tuple[str, ...]], ...]:
    section = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(section, GNUVerNeedSection):
        return ()
    asked = {
        str(library.name): tuple(sorted(str(version.name) for version in versions))
        for library, versions in section.iter_versions()
    }
    return tuple(sorted(asked.items()))


def unresolved(elf: Elf, folder: Path) -> tuple[str, ...]:
    """The unversioned symbols of ``elf`` that none of the libraries it can reach defines.

    Reached are the libraries of ``folder`` that DT_NEEDED leads to, directly or through one another: the scope in
    which the dynamic loader looks for the symbols of a file opened with RTLD_LOCAL (dlopen(3)). A library of
    ``folder`` that nothing needs does not count, although the process may have it loaded.
    Raises :class:`GateError` for a library that cannot be read.
    """
    wanted = set(elf.unversioned)
    queue, seen = list(elf.needed), set(elf.needed)
    while queue and wanted:
        library = folder / queue.pop(0)
        if not library.is_file():
            continue
        needed, defined = _look_up(library, wanted)
        wanted -= defined
        queue += [name for name in needed if name not in seen]
        seen.update(needed)
    return tuple(sorted(wanted))


def _look_up(library: Path, names: Iterable[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """What ``library`` needs, and which of ``names`` it defines: through its hash table, as the dynamic loader does.

    libtorch_cpu.so has 75,000 dynamic symbols (torch 2.13): reading them all takes seconds, and for each op again.
    """
    with open_elf(library) as elf:
        table = elf.get_section_by_name(".gnu.hash") or elf.get_section_by_name(".hash")
        if not isinstance(table, GNUHashSection | ELFHashSection):
            raise GateError("no symbol hash table")
        found = {name: table.get_symbol(name) for name in names}
        defined = frozenset(name for name, symbol in found.items() if symbol and not _undefined(symbol))
        return _dynamic(elf, "DT_NEEDED"), defined
