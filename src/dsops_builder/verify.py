"""Hold a finished wheel against every gate; all failures are reported together.

What a wheel is: Binary distribution format (PEP 427 and its successors), platform tags PEP 600, Core metadata.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile, ZipInfo

from packaging.metadata import Metadata
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from dsops_builder.elf import read_elf
from dsops_builder.errors import GateError
from dsops_builder.fatbin import GpuCode, read_gpu_code
from dsops_builder.gates import (
    Failure,
    check_build_paths,
    check_gpu_code,
    check_identity,
    check_instructions,
    check_needed,
    check_record_of,
    check_search_paths,
    check_symbols,
)
from dsops_builder.isa import read_instructions
from dsops_builder.process import Runner
from dsops_builder.repair import NEWEST_TAG, prove
from dsops_builder.wheel import PAYLOADS, archive_order, member
from dsops_prebuilt._errors import ManifestError
from dsops_prebuilt._manifest import FILE_NAME, Artifact, Manifest
from dsops_prebuilt._variant import GpuArch

# A public index takes files up to 100 MB without a request; the rest is room for a rebuild that grew.
BUDGET = 95_000_000
_CORE = "dsops-prebuilt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the gates need beside the wheel; None where there was no build to ask, which leaves a gate out.

    ``torch_libs`` has the ``torch/lib`` folder and ``archs`` the arch list of each torch minor release (``"2.7"``), for
    all of the wheel's; ``forbidden`` are the path prefixes of the building machine.
    """

    runner: Runner
    cuobjdump: Path | None = None
    torch_libs: Mapping[str, Path] | None = None
    archs: Mapping[str, tuple[GpuArch, ...]] | None = None
    forbidden: tuple[str, ...] = ()
    budget: int = BUDGET


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
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
        return tuple(entry.filename for entry in self.entries)

    @property
    def dist_info(self) -> str:
        return "-".join(self.path.name.split("-")[:2]) + ".dist-info"

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def verify_wheel(path: Path, context: Context) -> tuple[str, ...]:
    """Return what was checked and what was left out: one line for the wheel, one for each shared object.

    Raises :class:`GateError` with every failure (the file, what was found, what was wanted), and
    :class:`~dsops_builder.errors.CommandError` when cuobjdump does not run.
    """
    with TemporaryDirectory() as scratch:
        opened = _open(path, Path(scratch))
        failures = [*_size(path, context.budget), *_archive(opened), *_record(opened), *_tag(opened)]
        for name in opened.names:
            failures += check_build_paths(name, opened.read(name), context.forbidden)
        checked = [f"{path.name}: archive, RECORD, metadata, manifest, tag, size {path.stat().st_size}, build paths"]
        try:
            root, manifest = _manifest(opened)
        except (ManifestError, GateError) as error:
            wanted = f"one {FILE_NAME} that this release reads"
            failures.append(Failure(gate="manifest", file=path.name, found=str(error), wanted=wanted))
            failures += _metadata(opened, None)
        else:
            failures += [
                *_metadata(opened, manifest),
                *_files(opened, root, manifest),
                *_asked(opened, manifest, context),
            ]
            for artifact in manifest.artifacts:
                if f"{root}/{artifact.file}" in opened.names:
                    failures += _judge(opened, f"{root}/{artifact.file}", artifact, context)
                    checked.append(_summary(artifact, context))
    if failures:
        listing = "".join(f"\n  {failure}" for failure in failures)
        raise GateError(f"{path.name}: {len(failures)} failed:{listing}")
    return tuple(checked)


def _open(path: Path, folder: Path) -> _Opened:
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
        with ZipFile(path) as archive:
            archive.extractall(folder)
            # extractall checks each member's CRC; folders are told from files by the archive gate.
            entries = tuple(archive.infolist())
    except (InvalidWheelFilename, BadZipFile, OSError) as error:
        raise GateError(f"{path.name}: not a readable wheel: {error}") from error
    return _Opened(
        path=path,
        folder=folder,
        entries=tuple(entry for entry in entries if not entry.is_dir()),
        distribution=name,
        version=str(version),
        build="".join(str(part) for part in build),
        tags=tags,
    )


def _size(path: Path, budget: int) -> Iterator[Failure]:
    size = path.stat().st_size
    if size > budget:
        yield Failure(gate="size", file=path.name, found=f"{size} bytes", wanted=f"at most {budget}")


def _archive(opened: _Opened) -> Iterator[Failure]:
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


def _record(opened: _Opened) -> Iterator[Failure]:
    """RECORD lists every file but itself with its true sha256 and size, and no other."""
    record = f"{opened.dist_info}/RECORD"
    if record not in opened.names:
        yield Failure(gate="RECORD", file=opened.path.name, found="none", wanted=record)
        return
    rows = {row[0]: tuple(row[1:]) for row in csv.reader(opened.read(record).decode().splitlines()) if row}
    for name in sorted({*opened.names, *rows} - {record}):
        listed = rows.get(name, ("not listed",))
        real: tuple[str, ...] = ("no such file",)
        if name in opened.names:
            content = opened.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            real = (f"sha256={digest}", str(len(content)))
        if listed != real:
            yield Failure(
                gate="RECORD", file=name, found=", ".join(real), wanted=f"{', '.join(listed)}, as RECORD says"
            )


def _tag(opened: _Opened) -> Iterator[Failure]:
    """Every platform tag in the name is true by auditwheel's policies, and none is newer than the one promised."""
    try:
        proof = prove(opened.path)
    except GateError as error:
        yield Failure(gate="tag", file=opened.path.name, found=str(error), wanted="a wheel that auditwheel reads")
        return
    true = proof.tags[: proof.tags.index(NEWEST_TAG) + 1] if NEWEST_TAG in proof.tags else ()
    for platform in sorted({tag.platform for tag in opened.tags} - set(true)):
        because = f", because of {proof.obstacles}" if proof.obstacles else ""
        wanted = f"one of {', '.join(true) or 'none'}{because}"
        yield Failure(gate="tag", file=opened.path.name, found=platform, wanted=wanted)


def _manifest(opened: _Opened) -> tuple[str, Manifest]:
    found = [name for name in opened.names if name.endswith(f"/{FILE_NAME}")]
    if len(found) != 1:
        raise GateError(", ".join(found) or f"no {FILE_NAME}")
    try:
        text = opened.read(found[0]).decode()
    except UnicodeDecodeError as error:
        raise GateError(f"{found[0]}: {error}") from error
    return found[0].rpartition("/")[0], Manifest.from_json(text, found[0])


def _metadata(opened: _Opened, manifest: Manifest | None) -> Iterator[Failure]:
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
    tags = frozenset(str(tag) for tag in opened.tags)
    pairs = [
        ("METADATA Name", canonicalize_name(metadata.name), opened.distribution),
        ("METADATA Version", str(metadata.version), opened.version),
        ("WHEEL Build", str(wheel["Build"] or ""), opened.build),
        ("WHEEL Tag", ", ".join(sorted(wheel.get_all("Tag", []))), ", ".join(sorted(tags))),
        ("WHEEL Root-Is-Purelib", str(wheel["Root-Is-Purelib"]).lower(), "false"),
    ]
    if opened.distribution != _CORE:
        requires = ", ".join(str(requirement) for requirement in metadata.requires_dist or [])
        pairs.append(("METADATA Requires-Dist", requires, f"{_CORE}=={opened.version}"))
    if manifest is not None:
        pairs += [
            ("manifest distribution", manifest.distribution, opened.distribution),
            ("manifest version", manifest.version, opened.version),
            ("manifest build", str(manifest.build), opened.build),
        ]
    for what, found, wanted in pairs:
        if found != wanted:
            yield Failure(gate="metadata", file=opened.path.name, found=f"{what} {found or 'none'}", wanted=wanted)


def _files(opened: _Opened, root: str, manifest: Manifest) -> Iterator[Failure]:
    """The manifest lists every shared object of the wheel once, lies in the label's folder, and fits the Python tag."""
    listed = [f"{root}/{artifact.file}" for artifact in manifest.artifacts]
    # By content too: an ELF that is called something else is loaded just as well.
    present = {n for n in opened.names if n.endswith(".so") or opened.read(n).startswith(b"\x7fELF")}
    for name in sorted(present - set(listed)):
        yield Failure(gate="manifest", file=name, found="a shared object that is not listed", wanted="every one listed")
    for name in sorted(set(listed)):
        if name not in present:
            yield Failure(gate="manifest", file=name, found="listed, and not in the wheel", wanted="every one there")
        if listed.count(name) > 1:
            yield Failure(gate="manifest", file=name, found=f"listed {listed.count(name)} times", wanted="once")
    if opened.distribution != _CORE and root != f"{PAYLOADS}/{manifest.label}":
        yield Failure(gate="manifest", file=f"{root}/{FILE_NAME}", found=root, wanted=f"{PAYLOADS}/{manifest.label}")
    pythons = sorted({f"{tag.interpreter}-{tag.abi}" for tag in opened.tags})
    for artifact in manifest.artifacts:
        wanted = "py3-none" if artifact.python is None else f"{artifact.python}-{artifact.python}"
        if pythons != [wanted]:
            yield Failure(
                gate="python", file=f"{root}/{artifact.file}", found=f"in a wheel for {pythons}", wanted=wanted
            )


def _asked(opened: _Opened, manifest: Manifest, context: Context) -> Iterator[Failure]:
    """Every torch that an arch list was asked for has GPU code in the wheel."""
    there = {a.torch.minor for a in manifest.artifacts if a.torch is not None and a.cuda is not None}
    for minor in sorted(set(context.archs or ()) - there):
        yield Failure(gate="GPU code", file=opened.path.name, found="none", wanted=f"some for torch {minor}")


def _judge(opened: _Opened, name: str, artifact: Artifact, context: Context) -> Iterator[Failure]:
    path, content = opened.folder / name, opened.read(name)
    try:
        elf = read_elf(path)
        yield from check_identity(name, elf, artifact)
        yield from check_record_of(name, hashlib.sha256(content).hexdigest(), len(content), elf, artifact)
        yield from check_needed(name, elf, artifact)
        yield from check_search_paths(name, elf)
        if context.torch_libs is not None or artifact.torch is None:
            yield from check_symbols(name, elf, artifact, context.torch_libs or {})
        if elf.machine == "x86_64":
            yield from check_instructions(name, read_instructions(path), artifact)
        if elf.gpu_code != (artifact.cuda is not None):
            found, wanted = ("GPU code", "none") if elf.gpu_code else ("no GPU code", "some")
            yield Failure(gate="GPU code", file=name, found=found, wanted=f"{wanted}, as the manifest lists")
        elif artifact.cuda is not None:
            yield from _judge_gpu_code(path, name, artifact, context)
    except GateError as error:
        yield Failure(gate="ELF", file=name, found=str(error), wanted="a file that can be read")


def _judge_gpu_code(path: Path, name: str, artifact: Artifact, context: Context) -> Iterator[Failure]:
    if context.cuobjdump is not None:
        code = read_gpu_code(path, context.cuobjdump, context.runner)
        yield from check_gpu_code(name, code, artifact, context.archs)
    elif context.archs is not None:
        yield Failure(gate="GPU code", file=name, found="no cuobjdump to list it with", wanted="one")


def _summary(artifact: Artifact, context: Context) -> str:
    parts = [artifact.machine, f"instructions up to {artifact.simd}", "DT_NEEDED", "search paths"]
    if artifact.torch is None:
        parts.append("symbols")
    elif context.torch_libs is not None:
        parts.append(f"symbols against torch {artifact.torch.minor}")
    else:
        parts.append("symbols NOT checked (no torch at hand)")
    if artifact.cuda is not None and context.cuobjdump is not None:
        parts.append(str(GpuCode(sass=artifact.cuda.sass, ptx=artifact.cuda.ptx)))
    elif artifact.cuda is not None:
        parts.append("GPU code NOT checked (no cuobjdump at hand)")
    return f"{artifact.file}: {', '.join(parts)}"
