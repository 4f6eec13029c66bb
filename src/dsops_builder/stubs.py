"""Make shared libraries that have names, symbols and versions and no code: what a linker or a loader needs to see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

from dsops_builder.errors import ToolchainError
from dsops_builder.process import Runner

_HIDDEN = 0x8000
# "Return this number", by machine (System V ABI, AMD64 and AArch64 supplements).
_RETURN = {"x86_64": "movl ${answer},%eax\nret", "aarch64": "movz w0,#{answer}\nret"}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StubSymbol:
    """One dynamic symbol. ``version`` is empty for none; ``default`` is ``@@`` against ``@``."""

    name: str
    version: str = ""
    default: bool = True
    is_function: bool = True
    weak: bool = False
    size: int = 1


def defined_symbols(library: Path) -> tuple[StubSymbol, ...]:
    """Every versioned symbol that ``library`` defines, as its ``.gnu.version_d`` names them; TLS left out."""
    with library.open("rb") as stream:
        elf = ELFFile(stream)
        definitions = elf.get_section_by_name(".gnu.version_d")
        versions = elf.get_section_by_name(".gnu.version")
        table = elf.get_section_by_name(".dynsym")
        if not (
            isinstance(definitions, GNUVerDefSection)
            and isinstance(versions, GNUVerSymSection)
            and isinstance(table, SymbolTableSection)
        ):
            return ()
        names = {entry["vd_ndx"]: next(aux).name for entry, aux in definitions.iter_versions()}
        found = []
        for index, symbol in enumerate(table.iter_symbols()):
            number = versions.get_symbol(index)["ndx"]
            if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or not isinstance(number, int):
                continue
            kind = symbol["st_info"]["type"]
            if kind == "STT_TLS" or (number & ~_HIDDEN) not in names:
                continue
            found.append(
                StubSymbol(
                    name=symbol.name,
                    version=names[number & ~_HIDDEN],
                    default=not number & _HIDDEN,
                    is_function=kind != "STT_OBJECT",
                    weak=symbol["st_info"]["bind"] == "STB_WEAK",
                    size=max(symbol["st_size"], 1),
                )
            )
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """What one ELF file asks of others: DT_NEEDED, versioned symbols by library, symbols without a version."""

    needed: tuple[str, ...]
    versioned: tuple[tuple[str, StubSymbol], ...]
    plain: frozenset[str]
    defined: frozenset[str]


def wants(path: Path) -> Wants:
    """Read :class:`Wants` from ``.dynamic``, ``.dynsym`` and ``.gnu.version_r``. Raises :class:`ToolchainError`."""
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        dynamic, table = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        if not isinstance(dynamic, DynamicSection) or not isinstance(table, SymbolTableSection):
            raise ToolchainError(f"{path}: not a shared library")
        # pyelftools sets the attribute for tags of this kind alone.
        needed = tuple(str(vars(tag)["needed"]) for tag in dynamic.iter_tags("DT_NEEDED"))
        versions = elf.get_section_by_name(".gnu.version")
        requirements = elf.get_section_by_name(".gnu.version_r")
        sources = {}
        if isinstance(requirements, GNUVerNeedSection):
            for library, auxiliaries in requirements.iter_versions():
                sources.update({aux["vna_other"]: (str(library.name), str(aux.name)) for aux in auxiliaries})
        versioned, plain, defined = [], set(), set()
        for index, symbol in enumerate(table.iter_symbols()):
            number = versions.get_symbol(index)["ndx"] if isinstance(versions, GNUVerSymSection) else 0
            if symbol["st_shndx"] != "SHN_UNDEF":
                defined.add(symbol.name)
            elif isinstance(number, int) and (number & ~_HIDDEN) in sources:
                library_name, version = sources[number & ~_HIDDEN]
                versioned.append((library_name, StubSymbol(name=symbol.name, version=version)))
            elif symbol.name and symbol["st_info"]["bind"] != "STB_WEAK":
                plain.add(symbol.name)
        return Wants(needed=needed, versioned=tuple(versioned), plain=frozenset(plain), defined=frozenset(defined))


def capped(symbols: Iterable[StubSymbol], ceilings: dict[str, tuple[int, ...]]) -> tuple[StubSymbol, ...]:
    """Drop versions above the ceiling of their family; of each name the newest version left becomes the default.

    ``ceilings`` maps a family (``GLIBC``) to the newest version allowed (``(2, 28)``); versions of other families,
    and those that are no numbers (``GLIBC_PRIVATE``), are dropped.
    """
    by_name: dict[str, list[tuple[tuple[int, ...], StubSymbol]]] = defaultdict(list)
    for symbol in symbols:
        family, _, number = symbol.version.partition("_")
        parts = number.split(".")
        if family in ceilings and all(part.isdigit() for part in parts):
            version = tuple(int(part) for part in parts)
            if version <= ceilings[family]:
                by_name[symbol.name].append((version, symbol))
    result = []
    for versions in by_name.values():
        versions.sort(key=lambda pair: pair[0])
        result += [replace(symbol, default=False) for _, symbol in versions[:-1]]
        result.append(replace(versions[-1][1], default=True))
    return tuple(sorted(result))


def write_stub(
    path: Path,
    symbols: Sequence[StubSymbol],
    compiler: Path,
    runner: Runner,
    *,
    answer: int = 0,
    machine: str = "x86_64",
) -> None:
    """Write a shared library for ``machine`` that defines ``symbols``; every function returns ``answer``.

    Raises :class:`~dsops_builder.errors.CommandError` when the assembler or the linker refuses.
    """
    assembly, version_script = path.with_suffix(".s"), path.with_suffix(".map")
    assembly.write_text(_assembly(symbols, _RETURN[machine].format(answer=answer)), encoding="ascii")
    command = [str(compiler), "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", str(path)]
    versions = sorted({symbol.version for symbol in symbols if symbol.version})
    if versions:
        version_script.write_text("".join(f"{version} {{}};\n" for version in versions), encoding="ascii")
        command.append(f"-Wl,--version-script={version_script}")
    runner.run([*command, str(assembly)])
    assembly.unlink()
    version_script.unlink(missing_ok=True)


def _assembly(symbols: Sequence[StubSymbol], function: str) -> str:
    code, data = [".text"], [".data"]
    for number, symbol in enumerate(symbols):
        label = f'"{symbol.name}"' if not symbol.version else f"dsops_stub_{number}"
        kind, body = ("object", f".zero {symbol.size}")
        if symbol.is_function:
            kind, body = ("function", function)
        lines = code if symbol.is_function else data
        lines.append(f".{'weak' if symbol.weak else 'globl'} {label}\n.type {label},@{kind}\n{label}:\n{body}")
        if not symbol.is_function:
            lines.append(f".size {label},{symbol.size}")
        if symbol.version:
            # "remove" keeps the label itself out of the symbol table (GNU as 2.35, .symver).
            at = "@@" if symbol.default else "@"
            lines.append(f".symver {label},{symbol.name}{at}{symbol.version},remove")
    return "\n".join([*code, *data, '.section .note.GNU-stack,"",@progbits', ""])
