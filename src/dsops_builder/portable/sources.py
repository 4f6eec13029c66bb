"""Find the DeepSpeed releases that have the same code for an op: by bytes, then by what the preprocessor makes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from dsops_builder.errors import CompileError
from dsops_builder.model import Op
from dsops_builder.portable.model import Expansion, Sources
from dsops_prebuilt._manifest import SourceDigest

# In angle brackets too: -Iincludes comes before the system's folders.
_INCLUDE = re.compile(r"""^\s*#\s*include\s*["<]([^">]+)[">]""", re.MULTILINE)
# Macros that DeepSpeed's builders define for the accelerator and not for the machine (op_builder/builder.py, 0.19.7:
# get_cuda_compile_flag, and what is added for ROCm). No release from 0.14.3 on reads one, so one file serves all.
ACCELERATOR_MACROS = ("__ENABLE_CUDA__", "__DISABLE_CUDA__", "__ENABLE_CANN__", "__HIP_PLATFORM_AMD__")


def read_sources(op: Op, trees: Mapping[str, Path]) -> tuple[Sources, ...]:
    """The op's sources, one entry for each set of bytes. ``trees`` has the csrc folder of each release.

    Raises :class:`CompileError` for a release without one of the sources, or whose code asks for the accelerator.
    """
    groups: dict[str, list[str]] = {}
    for release in sorted(trees, key=Version):
        groups.setdefault(_digest(op, release, trees[release]), []).append(release)
    return tuple(Sources(op=op, releases=tuple(names), csrc=trees[names[0]]) for names in groups.values())


def _digest(op: Op, release: str, csrc: Path) -> str:
    """Digest of the sources and of every local header that an include directive could reach, whatever the macros."""
    digest = hashlib.sha256()
    try:
        for path in reachable(csrc, op.portable):
            content = path.read_bytes()
            asked = [macro for macro in ACCELERATOR_MACROS if macro.encode() in content]
            if asked:
                raise CompileError(
                    f"{op.id} of DeepSpeed {release}: {path.relative_to(csrc)} asks for {asked[0]}, so its code is not "
                    "the same on every accelerator; it cannot be portable as it is"
                )
            digest.update(f"{path.relative_to(csrc)}\0{len(content)}\0".encode())
            digest.update(content)
    except OSError as error:
        raise CompileError(f"{op.id} of DeepSpeed {release}: {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def reachable(csrc: Path, names: Iterable[str]) -> Iterator[Path]:
    """The sources ``names`` and every header below ``csrc`` that an include directive leads to, whatever the macros.

    Raises :class:`OSError` for a source that is not there.
    """
    pending = [csrc / name for name in names]
    seen: set[Path] = set()
    while pending:
        path = pending.pop(0)
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            found = next((place / name for place in (path.parent, csrc / "includes") if (place / name).exists()), None)
            if found is not None:
                pending.append(found)


def same_code(expansions: Iterable[Expansion]) -> tuple[tuple[Expansion, ...], ...]:
    """The expansions in groups of one text each: the compiler is given the same words, so one file serves a group."""
    groups: dict[tuple[str, str, str, str], list[Expansion]] = {}
    for one in expansions:
        groups.setdefault((one.sources.op.id, one.simd, one.macro, one.sha256), []).append(one)
    return tuple(tuple(group) for group in groups.values())


def digests(expansions: Sequence[Expansion]) -> tuple[SourceDigest, ...]:
    """The source digests of a group, oldest release first; releases with one digest are one entry."""
    known: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for one in expansions:
        known.setdefault((one.closure_sha256, one.closure), []).extend(one.sources.releases)
    found = [
        SourceDigest(sha256=sha256, closure=closure, deepspeed=tuple(sorted(set(releases), key=Version)))
        for (sha256, closure), releases in known.items()
    ]
    return tuple(sorted(found, key=lambda digest: Version(digest.deepspeed[0])))
