"""The gates of a wheel's payload: its manifest, and every shared object that the manifest lists."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsops_builder.elf import read_elf
from dsops_builder.errors import GateError
from dsops_builder.fatbin import GpuCode, read_gpu_code
from dsops_builder.gates import (
    Failure,
    check_contents,
    check_exports,
    check_gpu_code,
    check_identity,
    check_instructions,
    check_manifest,
    check_needed,
    check_record_of,
    check_search_paths,
    check_symbols,
)
from dsops_builder.isa import read_instructions
from dsops_builder.process import Runner
from dsops_builder.verify.opened import CORE, Opened, check_archive, check_metadata, check_tag
from dsops_prebuilt._errors import ManifestError
from dsops_prebuilt._manifest import FILE_NAME, FOLDER, Artifact, Manifest
from dsops_prebuilt._variant import GpuArch

_DECODED = "x86_64"
"""The machine whose instructions isa.py reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the gates need beside the wheel; None where there was no build to ask, which leaves a gate out.

    ``torch_libs`` has the ``torch/lib`` folder and ``archs`` the arch list of each torch minor release (``"2.7"``), for
    all of the wheel's; ``forbidden`` are the path prefixes of the building machine; ``budget`` is in bytes.
    """

    runner: Runner
    cuobjdump: Path | None = None
    torch_libs: Mapping[str, Path] | None = None
    archs: Mapping[str, tuple[GpuArch, ...]] | None = None
    forbidden: tuple[str, ...] = ()
    budget: int | None = None


def _manifest(opened: Opened) -> tuple[str, Manifest]:
    found = [name for name in opened.names if name.endswith(f"/{FILE_NAME}")]
    if len(found) != 1:
        raise GateError(", ".join(found) or f"no {FILE_NAME}")
    try:
        manifest = Manifest.from_json(opened.read(found[0]).decode(), found[0])
    except (UnicodeDecodeError, RecursionError) as error:
        raise GateError(f"{found[0]}: {error}") from error
    return found[0].rpartition("/")[0], manifest


def check_payload(opened: Opened, context: Context) -> tuple[list[Failure], list[str]]:
    """The gates of a payload, and a line for each shared object that was judged."""
    failures = [*check_archive(opened), *check_tag(opened)]
    try:
        root, manifest = _manifest(opened)
    except (ManifestError, GateError) as error:
        wanted = f"one {FILE_NAME} that this release reads"
        failures.append(Failure(gate="manifest", file=opened.path.name, found=str(error), wanted=wanted))
        return [*failures, *check_metadata(opened, None)], []
    core = opened.distribution == CORE
    # Beside the payload, a platform wheel of the core has the loader, which is judged by itself.
    names = [name for name in opened.names if not core or name.startswith(f"{FOLDER}/")]
    failures += [
        *check_metadata(opened, manifest),
        *check_contents(root, manifest, opened.dist_info, names, opened.shared),
        *check_manifest(root, manifest),
        *_pythons(opened, root, manifest),
        *_machines(opened, root, manifest),
        *_asked(opened, manifest, context),
    ]
    checked = []
    for artifact in manifest.artifacts:
        if f"{root}/{artifact.file}" in opened.names:
            failures += _judge(opened, f"{root}/{artifact.file}", artifact, context)
            checked.append(_summary(artifact, context))
    return failures, checked


def _pythons(opened: Opened, root: str, manifest: Manifest) -> Iterator[Failure]:
    """The file name's Python is that of every artifact."""
    pythons = sorted({f"{tag.interpreter}-{tag.abi}" for tag in opened.tags})
    for artifact in manifest.artifacts:
        wanted = "py3-none" if artifact.python is None else f"{artifact.python}-{artifact.python}"
        if pythons != [wanted]:
            found = f"in a wheel for {pythons}"
            yield Failure(gate="python", file=f"{root}/{artifact.file}", found=found, wanted=wanted)


def _machines(opened: Opened, root: str, manifest: Manifest) -> Iterator[Failure]:
    """The file name's machine is that of every artifact: auditwheel passes over the files of another."""
    platforms = sorted({tag.platform for tag in opened.tags})
    for artifact in manifest.artifacts:
        if not all(platform.endswith(f"_{artifact.machine}") for platform in platforms):
            found = f"in a wheel for {', '.join(platforms)}"
            yield Failure(gate="machine", file=f"{root}/{artifact.file}", found=found, wanted=artifact.machine)


def _asked(opened: Opened, manifest: Manifest, context: Context) -> Iterator[Failure]:
    """Every torch that an arch list was asked for has GPU code in the wheel."""
    there = {a.torch.minor for a in manifest.artifacts if a.torch is not None and a.cuda is not None}
    for minor in sorted(set(context.archs or ()) - there):
        yield Failure(gate="GPU code", file=opened.path.name, found="none", wanted=f"some for torch {minor}")


def _judge(opened: Opened, name: str, artifact: Artifact, context: Context) -> Iterator[Failure]:
    path, content = opened.folder / name, opened.read(name)
    try:
        elf = read_elf(path)
        yield from check_identity(name, elf, artifact)
        yield from check_record_of(name, hashlib.sha256(content).hexdigest(), len(content), elf, artifact)
        yield from check_needed(name, elf, artifact)
        yield from check_search_paths(name, elf)
        yield from check_exports(name, elf, artifact)
        if context.torch_libs is not None or artifact.torch is None:
            yield from check_symbols(name, elf, artifact, context.torch_libs or {})
        # A file for another machine than the level's has been told already.
        if elf.machine == artifact.simd.machine == _DECODED:
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
    decoded = artifact.machine == _DECODED
    instructions = (
        f"instructions up to {artifact.simd}" if decoded else f"instructions NOT checked (only {_DECODED}'s are)"
    )
    parts = [artifact.machine, instructions, "DT_NEEDED", "search paths"]
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
