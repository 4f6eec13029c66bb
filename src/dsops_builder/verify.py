"""Hold a finished wheel against every gate; all failures are reported together.

What a wheel is: Binary distribution format (PEP 427 and its successors), platform tags PEP 600, Core metadata.
"""

from __future__ import annotations

import hashlib
import lzma
import struct
import zlib
from collections.abc import Iterator, Mapping
from configparser import Error as ConfigError
from configparser import RawConfigParser
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
    check_contents,
    check_gpu_code,
    check_identity,
    check_instructions,
    check_manifest,
    check_needed,
    check_record,
    check_record_of,
    check_search_paths,
    check_symbols,
)
from dsops_builder.isa import read_instructions
from dsops_builder.process import Runner
from dsops_builder.repair import NEWEST_TAG, prove
from dsops_builder.wheel import archive_order, member
from dsops_prebuilt._errors import ManifestError
from dsops_prebuilt._manifest import FILE_NAME, Artifact, Manifest
from dsops_prebuilt._variant import GpuArch

# A public index takes files up to 100 MB without a request; the rest is room for a rebuild that grew.
BUDGET = 95_000_000
_CORE = "dsops-prebuilt"
_HOOK = ("dsops_prebuilt_activate.py", "dsops_prebuilt_activate.pth", "dsops_prebuilt_activate.start")
_LOADER_METADATA = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")
_ENTRY_POINT = {"dsops_prebuilt": "dsops_prebuilt_activate:install"}
# What zipfile lets through for archives that are broken, encrypted, or compressed in a way that it does not know.
_UNREADABLE = (
    BadZipFile, OSError, RuntimeError, ValueError, LookupError, EOFError, MemoryError, OverflowError,
    struct.error, zlib.error, lzma.LZMAError,
)  # fmt: skip


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

    @property
    def shared(self) -> set[str]:
        """The shared objects. By content too: an ELF that is called something else is loaded just as well."""
        return {name for name in self.names if name.endswith(".so") or self.read(name).startswith(b"\x7fELF")}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def verify_wheel(path: Path, context: Context) -> tuple[str, ...]:
    """Return what was checked and what was left out: one line for the wheel, one for each shared object.

    Raises :class:`GateError` with every failure (the file, what was found, what was wanted), and
    :class:`~dsops_builder.errors.CommandError` when cuobjdump does not run.
    """
    with TemporaryDirectory() as scratch:
        opened = _open(path, Path(scratch))
        failures = [
            *_size(path, context.budget),
            *check_record(f"{opened.dist_info}/RECORD", opened.names, opened.read),
        ]
        for name in opened.names:
            failures += check_build_paths(name, opened.read(name), context.forbidden)
        facts = f"size {path.stat().st_size}, build paths"
        if opened.distribution == _CORE:
            failures += _loader(opened)
            checked = [f"{path.name}: RECORD, metadata, tag, contents, entry point, {facts}"]
        else:
            found, lines = _payload(opened, context)
            failures += found
            checked = [f"{path.name}: archive, RECORD, contents, metadata, manifest, tag, {facts}", *lines]
    if failures:
        listing = "".join(f"\n  {failure}" for failure in failures)
        raise GateError(f"{path.name}: {len(failures)} failed:{listing}")
    return tuple(checked)


def _open(path: Path, folder: Path) -> _Opened:
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
        manifest = Manifest.from_json(opened.read(found[0]).decode(), found[0])
    except (UnicodeDecodeError, RecursionError) as error:
        raise GateError(f"{found[0]}: {error}") from error
    return found[0].rpartition("/")[0], manifest


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
    purelib = "true" if opened.distribution == _CORE else "false"
    pairs = [
        ("METADATA Name", canonicalize_name(metadata.name), opened.distribution),
        ("METADATA Version", str(metadata.version), opened.version),
        ("WHEEL Build", str(wheel["Build"] or ""), opened.build),
        ("WHEEL Tag", ", ".join(sorted(map(str, wheel.get_all("Tag", [])))), ", ".join(sorted(map(str, opened.tags)))),
        ("WHEEL Root-Is-Purelib", str(wheel["Root-Is-Purelib"]).lower(), purelib),
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


def _payload(opened: _Opened, context: Context) -> tuple[list[Failure], list[str]]:
    """The gates of a payload, and a line for each shared object that was judged."""
    failures = [*_archive(opened), *_tag(opened)]
    try:
        root, manifest = _manifest(opened)
    except (ManifestError, GateError) as error:
        wanted = f"one {FILE_NAME} that this release reads"
        failures.append(Failure(gate="manifest", file=opened.path.name, found=str(error), wanted=wanted))
        return [*failures, *_metadata(opened, None)], []
    failures += [
        *_metadata(opened, manifest),
        *check_contents(root, manifest, opened.dist_info, opened.names, opened.shared),
        *check_manifest(root, manifest),
        *_pythons(opened, root, manifest),
        *_asked(opened, manifest, context),
    ]
    checked = []
    for artifact in manifest.artifacts:
        if f"{root}/{artifact.file}" in opened.names:
            failures += _judge(opened, f"{root}/{artifact.file}", artifact, context)
            checked.append(_summary(artifact, context))
    return failures, checked


def _loader(opened: _Opened) -> Iterator[Failure]:
    """The loader is pure Python that setuptools wrote: its package, and the hook that starts it, and nothing else."""
    name, info, shared = opened.path.name, opened.dist_info, opened.shared
    yield from _metadata(opened, None)
    tags = ", ".join(sorted(map(str, opened.tags)))
    if tags != "py3-none-any":
        yield Failure(gate="tag", file=name, found=tags, wanted="py3-none-any")
    own = {*_HOOK, *(f"{info}/{each}" for each in _LOADER_METADATA)}
    for each in opened.names:
        package = each.startswith("dsops_prebuilt/") and each.endswith((".py", "/py.typed"))
        if each in shared or not (package or each in own or each.startswith(f"{info}/licenses/")):
            wanted = "only dsops_prebuilt/, dsops_prebuilt_activate.* and metadata"
            yield Failure(gate="contents", file=each, found="a file that the loader does not have", wanted=wanted)
    for each in ("dsops_prebuilt/__init__.py", *_HOOK):
        if each not in opened.names:
            yield Failure(gate="contents", file=name, found=f"no {each}", wanted="it")
    entry_points = RawConfigParser(delimiters=("=",))
    try:
        entry_points.read_string(opened.read(f"{info}/entry_points.txt").decode())
        found = str(dict(entry_points.items("torch.backends")))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        found = str(error).replace("\n", " ")
    if found != str(_ENTRY_POINT):
        yield Failure(gate="entry point", file=name, found=found, wanted=f"{_ENTRY_POINT} in torch.backends")


def _pythons(opened: _Opened, root: str, manifest: Manifest) -> Iterator[Failure]:
    """The file name's Python is that of every artifact."""
    pythons = sorted({f"{tag.interpreter}-{tag.abi}" for tag in opened.tags})
    for artifact in manifest.artifacts:
        wanted = "py3-none" if artifact.python is None else f"{artifact.python}-{artifact.python}"
        if pythons != [wanted]:
            found = f"in a wheel for {pythons}"
            yield Failure(gate="python", file=f"{root}/{artifact.file}", found=found, wanted=wanted)


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
