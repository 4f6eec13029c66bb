"""Judge a wheel's files, its manifest and its shared objects: each gate says what it found and what it wanted."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsops_builder.elf import Elf, unresolved
from dsops_builder.fatbin import GpuCode, asked_for
from dsops_builder.isa import Instructions
from dsops_prebuilt._manifest import FILE_NAME, FOLDER, Artifact, Manifest, TorchBinding
from dsops_prebuilt._variant import GpuArch, TorchBuild

# The C and C++ runtimes, which every manylinux system has (PEP 600).
_SYSTEM = frozenset(
    {
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
)
_TORCH = frozenset({"libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"})
_TORCH_CUDA = frozenset({"libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_cu.so", "libtorch_cuda_cpp.so"})

# The functions of a portable library (ops/_portable).
_ABI = frozenset(
    {
        "dsops_abi",
        "dsops_bind_openmp",
        "dsops_call",
        "dsops_count",
        "dsops_entry",
        "dsops_failure",
        "dsops_name",
        "dsops_openmp_of",
        "dsops_released",
        "dsops_signature",
    }
)
_PYTHON_API = ("Py", "_Py")
# Ops are compiled with -fopenmp and not linked with it, so that they use the OpenMP runtime that torch loaded:
# libtorch_cpu.so needs it, under a name and in a folder that differ between torch releases. Where it lies beside
# libtorch_cpu.so these symbols are found like the others; this exempts them where it does not.
_OPENMP = ("GOMP_", "omp_")
_ACCELERATORS = ("cpu", "cuda")
_PRINTABLE, _PRINTABLE_END = re.compile(rb"[\x20-\x7e]*"), re.compile(rb"[\x20-\x7e]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A gate that did not hold."""

    gate: str
    file: str
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.file}: {self.gate}: found {self.found}; wanted {self.wanted}"


def check_record(record: str, names: Iterable[str], read: Callable[[str], bytes]) -> Iterator[Failure]:
    """RECORD lists every file but itself with its true sha256 and size, and no other."""
    names = set(names)
    if record not in names:
        yield Failure(gate="RECORD", file=record, found="none", wanted="one")
        return
    try:
        rows = {row[0]: tuple(row[1:]) for row in csv.reader(read(record).decode().splitlines()) if row}
    except (UnicodeDecodeError, csv.Error) as error:
        wanted = "lines of a path, a hash and a size"
        yield Failure(gate="RECORD", file=record, found=f"what cannot be read: {error}", wanted=wanted)
        return
    for name in sorted({*names, *rows} - {record}):
        listed = rows.get(name, ("not listed",))
        real: tuple[str, ...] = ("no such file",)
        if name in names:
            content = read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            real = (f"sha256={digest}", str(len(content)))
        if listed != real:
            wanted = f"{', '.join(listed)}, as RECORD says"
            yield Failure(gate="RECORD", file=name, found=", ".join(real), wanted=wanted)


def check_contents(
    root: str, manifest: Manifest, info: str, names: Iterable[str], shared: set[str]
) -> Iterator[Failure]:
    """The artifacts are there, each listed once, and beside them nothing that Python or an installer would run.

    ``root`` and ``info`` are the folders of the manifest and of the metadata; ``shared`` are those of ``names`` that
    are shared objects.
    """
    listed = [f"{root}/{artifact.file}" for artifact in manifest.artifacts]
    for name in sorted(shared - set(listed)):
        yield Failure(gate="manifest", file=name, found="a shared object that is not listed", wanted="every one listed")
    for name in sorted(set(listed)):
        if name not in shared:
            yield Failure(gate="manifest", file=name, found="listed, and not in the wheel", wanted="every one there")
        if listed.count(name) > 1:
            yield Failure(gate="manifest", file=name, found=f"listed {listed.count(name)} times", wanted="once")
    metadata = [f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD")]
    allowed = {f"{root}/{FILE_NAME}", *metadata, *listed, *shared}
    for name in sorted(set(names) - allowed):
        if not name.startswith(f"{info}/licenses/"):
            wanted = f"only {FILE_NAME}, what it lists, METADATA, WHEEL, RECORD and licenses/"
            yield Failure(gate="contents", file=name, found="a file that no payload has", wanted=wanted)


def check_manifest(root: str, manifest: Manifest) -> Iterator[Failure]:
    """The manifest lies in its label's folder, and does not contradict itself."""
    file = f"{root}/{FILE_NAME}"
    if root != f"{FOLDER}/{manifest.label}":
        yield Failure(gate="manifest", file=file, found=root, wanted=f"{FOLDER}/{manifest.label}")
    portable = manifest.label == "portable"
    distribution = "dsops-prebuilt" if portable else f"dsops-prebuilt-{manifest.label}"
    if manifest.distribution != distribution:
        found = f"distribution {manifest.distribution}"
        wanted = f"{distribution}, for the label {manifest.label}"
        yield Failure(gate="manifest", file=file, found=found, wanted=wanted)
    for artifact in manifest.artifacts:
        tier = "portable" if portable else "stock"
        if artifact.tier != tier:
            found, wanted = f"tier {artifact.tier}", f"{tier}, in the payload {manifest.label}"
            yield Failure(gate="manifest", file=f"{root}/{artifact.file}", found=found, wanted=wanted)
        for holds, found, wanted in _claims(artifact, manifest.label):
            if not holds:
                yield Failure(gate="manifest", file=f"{root}/{artifact.file}", found=found, wanted=wanted)


def _claims(artifact: Artifact, label: str) -> Iterator[tuple[bool, str, str]]:
    """What must hold between the keys of one artifact: whether it does, what was found, what was wanted."""
    op, file, sources = artifact.op, artifact.file, artifact.sources
    module = artifact.module.rpartition(".")[2]
    yield module == f"{op}_op", f"module {artifact.module}", f"one that ends in .{op}_op, for the op {op}"
    accelerators = artifact.accelerators
    known = set(accelerators) <= set(_ACCELERATORS) and len(set(accelerators)) == len(accelerators) > 0
    yield known, f"accelerators {', '.join(accelerators) or 'none'}", f"each once, of {', '.join(_ACCELERATORS)}"
    yield bool(sources), "no sources", "at least one digest of sources"
    for source in sources:
        full = bool(_SHA256.fullmatch(source.sha256) and source.closure and source.deepspeed)
        wanted = "a sha256, the files that it is of, and the DeepSpeed releases"
        yield full, f"sources {source.sha256 or 'without a digest'} of {len(source.closure)} files", wanted
    bound = artifact.tier != "stock" or (artifact.torch is not None and artifact.python is not None)
    yield bound, "a stock artifact without a torch or a Python", "both"
    plain = artifact.python is not None or ".cpython-" not in file
    yield plain, "no Python, and a file name for one", "the Python of the file name"
    toolkit = None if artifact.cuda is None else artifact.cuda.toolkit
    fits = toolkit is None or label == f"cu{toolkit.major}{toolkit.minor}"
    yield fits, f"toolkit {toolkit} in the payload {label}", "the toolkit of the label"
    *folders, _ = file.split("/")
    if artifact.tier == "portable":
        bindings = [name for name in ("python", "torch", "cuda") if getattr(artifact, name) is not None]
        yield not bindings, f"a portable artifact bound to {' and '.join(bindings)}", "none of python, torch, cuda"
    bound_to = []
    if artifact.torch is not None:
        yield from _torch_claims(artifact.torch)
        bound_to = [f"torch{artifact.torch.minor}"]
    releases = {release for source in sources for release in source.deepspeed}
    # Where accelerators have different kernels of one name, the folder names the accelerator too.
    ids = (op, f"{op}_{'_'.join(accelerators)}")
    wanted_folders = [
        [*bound_to, folder, f"ds{release}", artifact.simd.value] for folder in ids for release in releases
    ]
    wanted = " or ".join(sorted("/".join(each) for each in wanted_folders)) or "that of a DeepSpeed release"
    yield folders in wanted_folders, f"folder {'/'.join(folders) or 'none'}", wanted


def _torch_claims(torch: TorchBinding) -> Iterator[tuple[bool, str, str]]:
    built = TorchBuild(torch.built_with)
    yield torch.minor == built.minor, f"torch.minor {torch.minor}", f"{built.minor}, of torch {torch.built_with}"
    # Only a release shares its ABI with the others of its minor release.
    exact = None if built.is_release else torch.built_with
    yield torch.exact == exact, f"torch.exact {torch.exact}", f"{exact}, for torch {torch.built_with}"


def check_identity(file: str, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """The machine, the file name's suffix and the module's init function are those of the manifest."""
    machine = artifact.simd.machine
    if elf.machine != machine or artifact.machine != machine:
        found = f"a file for {elf.machine}, listed as {artifact.machine}"
        yield Failure(gate="machine", file=file, found=found, wanted=f"{machine}, the machine of {artifact.simd}")
    if artifact.python is None:
        return
    module = artifact.module.rpartition(".")[2]
    # What importlib accepts on this Python: sysconfig's EXT_SUFFIX (PEP 3149).
    name = f"{module}.cpython-{artifact.python.removeprefix('cp')}-{machine}-linux-gnu.so"
    if Path(file).name != name:
        yield Failure(gate="python", file=file, found=f"file name {Path(file).name}", wanted=name)
    if f"PyInit_{module}" not in elf.defined:
        yield Failure(gate="python", file=file, found="no such function", wanted=f"PyInit_{module} defined")


def check_needed(file: str, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """DT_NEEDED has only what comes with the system, with the torch that the artifact binds to, or with its CUDA."""
    allowed = set(_SYSTEM)
    if artifact.torch is not None:
        allowed |= _TORCH
    if artifact.cuda is not None:
        major = artifact.cuda.toolkit.major
        # CUDA 11 calls its runtime libcudart.so.11.0 in every minor release; from 12 on the name ends in the major.
        allowed |= _TORCH_CUDA | {f"libcudart.so.{major}", f"libcudart.so.{major}.0"}
    for library in elf.needed:
        if library not in allowed:
            yield Failure(gate="DT_NEEDED", file=file, found=library, wanted=f"only {', '.join(sorted(allowed))}")


def check_symbols(file: str, elf: Elf, artifact: Artifact, torch_libs: Mapping[str, Path]) -> Iterator[Failure]:
    """Every undefined symbol without a version is defined by something that will be there.

    auditwheel judges symbol versions only, so a symbol of a newer libc that was linked without one passes it and
    fails at ``dlopen`` (or, bound lazily, in the middle of training).
    """
    exempt: tuple[str, ...] = () if artifact.python is None else _PYTHON_API
    # With the old ABI, nothing of torch's takes or gives a std::__cxx11 type (libstdc++ manual, "Dual ABI").
    new = next((symbol for symbol in elf.unversioned if "__cxx11" in symbol), None)
    if new is not None and artifact.torch is not None and not artifact.torch.cxx11_abi:
        wanted = "none of the C++11 ABI, for torch.cxx11_abi is false"
        yield Failure(gate="symbols", file=file, found=new, wanted=wanted)
    if artifact.torch is None:
        missing, where = elf.unversioned, "the system's libraries"
    elif artifact.torch.minor not in torch_libs:
        found = f"no library folder of torch {artifact.torch.minor} to look in"
        yield Failure(gate="symbols", file=file, found=found, wanted="one for each torch of the wheel")
        return
    else:
        exempt += _OPENMP
        missing, where = unresolved(elf, torch_libs[artifact.torch.minor]), f"torch {artifact.torch.minor}"
    for symbol in missing:
        if not symbol.startswith(exempt):
            wanted = f"every symbol without a version defined by {where}"
            yield Failure(gate="symbols", file=file, found=f"{symbol} undefined", wanted=wanted)


def check_exports(file: str, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """A portable library exports its C ABI and nothing else.

    Of two definitions of one name the first that was loaded counts: an exported GOMP_parallel or kernel could be taken
    by another library, or be replaced by it.
    """
    if artifact.tier != "portable":
        return
    for symbol in sorted(elf.defined - _ABI):
        yield Failure(gate="exports", file=file, found=symbol, wanted=f"only {', '.join(sorted(_ABI))}")
    for symbol in sorted(_ABI - elf.defined):
        yield Failure(gate="exports", file=file, found=f"no {symbol}", wanted="it, for the loader calls it")


def check_instructions(file: str, code: Instructions, artifact: Artifact) -> Iterator[Failure]:
    """No instruction needs more than the artifact's SIMD level, and every executable byte is an instruction."""
    for use in code.above(artifact.simd):
        yield Failure(gate="instructions", file=file, found=str(use), wanted=f"nothing above {artifact.simd}")
    if code.undecodable:
        found = f"{len(code.undecodable)} undecodable, the first at {code.undecodable[0]:#x}"
        yield Failure(gate="instructions", file=file, found=found, wanted="only instructions in executable sections")


def check_gpu_code(
    file: str, code: GpuCode, artifact: Artifact, archs: Mapping[str, tuple[GpuArch, ...]] | None
) -> Iterator[Failure]:
    """SASS and PTX are those that the manifest lists, and those that the row asked of this torch."""
    if artifact.cuda is not None:
        listed = GpuCode(sass=tuple(sorted(artifact.cuda.sass)), ptx=tuple(sorted(artifact.cuda.ptx)))
        if code != listed:
            yield Failure(gate="GPU code", file=file, found=str(code), wanted=f"{listed}, as the manifest lists")
    if archs is None:
        return
    minor = "" if artifact.torch is None else artifact.torch.minor
    asked = asked_for(archs.get(minor, ()))
    if code != asked:
        yield Failure(
            gate="GPU code", file=file, found=str(code), wanted=f"{asked}, as asked for torch {minor or None}"
        )


def check_search_paths(file: str, elf: Elf) -> Iterator[Failure]:
    """No RPATH or RUNPATH: torch has loaded what the file needs, and a path would lead to another copy."""
    if elf.search_paths:
        found = "RPATH or RUNPATH " + ":".join(elf.search_paths)
        yield Failure(gate="search path", file=file, found=found, wanted="none")


def check_build_paths(file: str, content: bytes, prefixes: Iterable[str]) -> Iterator[Failure]:
    """None of ``prefixes``, paths of the machine that built, occurs in the bytes."""
    for prefix in prefixes:
        place = content.find(prefix.encode())
        if place >= 0:
            before, after = (
                _PRINTABLE_END.search(content[max(0, place - 200) : place]),
                _PRINTABLE.match(content, place),
            )
            text = ((before[0] if before else b"") + (after[0] if after else b"")).decode("ascii", "replace")[:400]
            yield Failure(gate="build path", file=file, found=repr(text), wanted=f"nothing with {prefix}")


def check_record_of(file: str, content_sha256: str, size: int, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """What the manifest records of the file (sha256, size, DT_NEEDED, newest glibc) is true."""
    real = (content_sha256, size, elf.needed, (elf.newest("GLIBC") or (0, 0))[:2])
    listed = (artifact.sha256, artifact.size, artifact.needed, artifact.glibc)
    for name, is_, says in zip(("sha256", "size", "DT_NEEDED", "glibc"), real, listed, strict=True):
        if is_ != says:
            yield Failure(gate="manifest", file=file, found=f"{name} {is_}", wanted=f"{says}, as the manifest lists")
