"""Unpack a finished wheel, and the gates that hold for every kind: archive, tag, metadata, size."""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from zipfile import BadZipFile, ZipFile, ZipInfo

from packaging.metadata import Metadata
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from dsops_builder.errors import GateError
from dsops_builder.gates import Failure
from dsops_builder.repair import prove
from dsops_builder.wheel import archive_order, member
from dsops_prebuilt._manifest import Manifest

CORE = "dsops-prebuilt"
"""The distribution with the loader; every other one is a payload."""
# What zipfile lets through for archives that are broken, encrypted, or compressed in a way that it does not know.
_UNREADABLE = (
    BadZipFile, OSError, RuntimeError, ValueError, LookupError, EOFError, MemoryError, OverflowError,
    struct.error, zlib.error, lzma.LZMAError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An unpacked wheel and what its file name says."""

    path: Path
    folder: Path
    entries: tuple[ZipInfo, ...]
    distribution: str
    version: str
    build: str
    tags: frozenset[Tag]

    @property
    def names(self) -> tuple[str, ...]:
        """The members, without folders."""
        return tuple(entry.filename for entry in self.entries)

    @property
    def pure(self) -> bool:
        """Whether this is the loader alone, by its name: the only wheel of ours without a platform."""
        return self.distribution == CORE and {str(tag) for tag in self.tags} == {"py3-none-any"}

    @property
    def dist_info(self) -> str:
        """Name of the folder with the metadata."""
        return "-".join(self.path.name.split("-")[:2]) + ".dist-info"

    @property
    def shared(self) -> set[str]:
        """The shared objects. By content too: an ELF that is called something else is loaded just as well."""
        return {name for name in self.names if name.endswith(".so") or self.read(name).startswith(b"\x7fELF")}

    def read(self, name: str) -> bytes:
        """The bytes of a member."""
        return (self.folder / name).read_bytes()


def open_wheel(path: Path, folder: Path) -> Opened:
    """Unpack the wheel into ``folder``. Raises :class:`GateError` for what is no wheel, or would land elsewhere."""
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
        with ZipFile(path) as archive:
            entries = tuple(archive.infolist())
            for entry in entries:
                # extractall would put such a member somewhere else than its name says.
                if {"", ".", ".."} & set(entry.filename.removesuffix("/").split("/")) or "\\" in entry.filename:
                    raise BadZipFile(f"the member {entry.filename!r} is not below the wheel's folder")
            # extractall checks each member's CRC.
            archive.extractall(folder)
    except (InvalidWheelFilename, *_UNREADABLE) as error:
        raise GateError(f"{path.name}: not a readable wheel: {error}") from error
    return Opened(
        path=path,
        folder=folder,
        entries=tuple(entry for entry in entries if not entry.is_dir()),
        distribution=name,
        version=str(version),
        build="".join(str(part) for part in build),
        tags=tags,
    )


def check_size(path: Path, budget: int) -> Iterator[Failure]:
    """The file is not larger than ``budget`` bytes."""
    size = path.stat().st_size
    if size > budget:
        yield Failure(gate="size", file=path.name, found=f"{size} bytes", wanted=f"at most {budget}")


def check_archive(opened: Opened) -> Iterator[Failure]:
    """The archive is what :func:`~dsops_builder.wheel.write_wheel` writes: the same bytes for the same contents."""
    if list(opened.names) != archive_order(set(opened.names)):
        found, wanted = ", ".join(opened.names), "each member once, sorted, dist-info last and RECORD behind it"
        yield Failure(gate="archive", file=opened.path.name, found=found, wanted=wanted)
    for entry in opened.entries:
        wanted_entry = member(entry.filename)
        for fact in ("date_time", "external_attr", "create_system", "compress_type", "extra", "comment"):
            is_, should = getattr(entry, fact), getattr(wanted_entry, fact)
            if is_ != should:
                yield Failure(gate="archive", file=entry.filename, found=f"{fact} {is_}", wanted=str(should))


def check_tag(opened: Opened) -> Iterator[Failure]:
    """Every platform tag in the name is true by auditwheel's policies, and none is newer than the one promised."""
    try:
        proof = prove(opened.path)
    except GateError as error:
        # auditwheel's own words may be of several lines; a failure is one.
        found = " ".join(str(error).split())
        yield Failure(gate="tag", file=opened.path.name, found=found, wanted="a wheel that auditwheel reads")
        return
    true = proof.tags[: proof.tags.index(proof.newest) + 1] if proof.newest in proof.tags else ()
    for platform in sorted({tag.platform for tag in opened.tags} - set(true)):
        because = f", because of {proof.obstacles}" if proof.obstacles else ""
        wanted = f"one of {', '.join(true) or 'none'}{because}"
        yield Failure(gate="tag", file=opened.path.name, found=platform, wanted=wanted)


def check_metadata(opened: Opened, manifest: Manifest | None) -> Iterator[Failure]:
    """File name, METADATA, WHEEL and manifest say the same."""
    info = opened.dist_info
    try:
        metadata = Metadata.from_email(opened.read(f"{info}/METADATA"))
        wheel = BytesParser().parsebytes(opened.read(f"{info}/WHEEL"))
    except (OSError, ExceptionGroup) as error:
        reasons = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        found = "; ".join(str(reason) for reason in reasons)
        yield Failure(gate="metadata", file=opened.path.name, found=found, wanted="valid METADATA and WHEEL")
        return
    purelib = "true" if opened.pure else "false"
    pairs = [
        ("METADATA Name", canonicalize_name(metadata.name), opened.distribution),
        ("METADATA Version", str(metadata.version), opened.version),
        ("WHEEL Build", str(wheel["Build"] or ""), opened.build),
        ("WHEEL Tag", ", ".join(sorted(map(str, wheel.get_all("Tag", [])))), ", ".join(sorted(map(str, opened.tags)))),
        ("WHEEL Root-Is-Purelib", str(wheel["Root-Is-Purelib"]).lower(), purelib),
    ]
    if opened.distribution != CORE:
        requires = ", ".join(str(requirement) for requirement in metadata.requires_dist or [])
        pairs.append(("METADATA Requires-Dist", requires, f"{CORE}=={opened.version}"))
    if manifest is not None:
        pairs += [
            ("manifest distribution", manifest.distribution, opened.distribution),
            ("manifest version", manifest.version, opened.version),
            # The loader's own wheel has no build tag.
            ("manifest build", str(manifest.build), "1" if opened.distribution == CORE else opened.build),
        ]
    for what, found, wanted in pairs:
        if found != wanted:
            yield Failure(gate="metadata", file=opened.path.name, found=f"{what} {found or 'none'}", wanted=wanted)
