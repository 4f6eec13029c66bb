"""Put compiled ops into a payload wheel, and seal the repaired wheel with its manifest; the same input, the same bytes.

Formats: Binary distribution format (PEP 427 and its successors on packaging.python.org), Core metadata 2.4.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipInfo

from packaging.utils import parse_wheel_filename
from packaging.version import Version
from wheel.wheelfile import WheelFile

from dsops_builder.elf import read_elf
from dsops_builder.errors import GateError, MatrixError
from dsops_builder.fatbin import GpuCode
from dsops_builder.model import Compiled, Target
from dsops_prebuilt._manifest import FILE_NAME, Artifact, CudaBinding, Manifest, SourceDigest, TorchBinding
from dsops_prebuilt._variant import CudaRelease, TorchBuild

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

PAYLOADS = "dsops_prebuilt_payloads"
# The first second that a zip archive can hold (APPNOTE 4.4.6). A real date would make every build differ.
DATE = (1980, 1, 1, 0, 0, 0)
_UNIX = 3
_DIST_INFO = ".dist-info"


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """What one payload wheel is made of: compiled ops of one row and one Python. ``licenses`` are name and text."""

    version: str
    compiled: tuple[Compiled, ...]
    licenses: tuple[tuple[str, str], ...] = ()

    @property
    def target(self) -> Target:
        """Any of the targets: row, build number, label and Python are the same in all."""
        return self.compiled[0].target

    @property
    def distribution(self) -> str:
        """``dsops-prebuilt-cu118``."""
        return f"dsops-prebuilt-{self.target.label}"

    @property
    def root(self) -> str:
        """The folder of the manifest inside the wheel."""
        return f"{PAYLOADS}/{self.target.label}"

    @property
    def stem(self) -> str:
        """``dsops_prebuilt_cu118-0.1.0``, which begins the names of the wheel and of its ``.dist-info``."""
        return f"{self.distribution.replace('-', '_')}-{self.version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One file of the payload (``file`` is relative to the manifest) and every target that came out as these bytes."""

    file: str
    compiled: tuple[Compiled, ...]


def slots(payload: Payload) -> tuple[Slot, ...]:
    """Where each compiled op goes; DeepSpeed releases whose op compiled to the same bytes share one file.

    Raises :class:`MatrixError` when the ops are not of one row and Python, or two would need the same place.
    """
    owners = {(c.target.row, c.target.build, c.target.label, c.target.python) for c in payload.compiled}
    if len(owners) != 1:
        raise MatrixError(f"a payload is made of one row and one Python, not of {sorted(owners) or 'nothing'}")
    groups: dict[tuple[object, ...], list[Compiled]] = {}
    for compiled in sorted(payload.compiled, key=lambda c: (Version(c.target.deepspeed), c.target.id)):
        groups.setdefault(_identity(compiled), []).append(compiled)
    result = [Slot(file=_place(group[0]), compiled=tuple(group)) for group in groups.values()]
    for slot in result:
        rivals = sorted(other.compiled[0].target.id for other in result if other.file == slot.file)
        if len(rivals) > 1:
            raise MatrixError(
                f"{' and '.join(rivals)} would both be {slot.file}: an artifact binds to torch's minor release, "
                "so a row can have one pairing of each"
            )
    return tuple(sorted(result, key=lambda slot: slot.file))


def _identity(compiled: Compiled) -> tuple[object, ...]:
    target = compiled.target
    digest = hashlib.sha256(compiled.path.read_bytes()).digest()
    return (target.torch, target.cxx11_abi, target.op.id, target.simd, target.toolkit, compiled.defines, digest)


def _place(compiled: Compiled) -> str:
    target = compiled.target
    torch = f"torch{TorchBuild(target.torch).minor}"
    folders = (torch, target.op.id, f"ds{target.deepspeed}", target.simd.value)
    return "/".join((*folders, compiled.path.name))


def pack(payload: Payload, folder: Path) -> Path:
    """Write the raw wheel, tagged ``linux_x86_64``, into ``folder``. It has no manifest: :func:`seal` writes that.

    Raises :class:`MatrixError` as :func:`slots` does.
    """
    python = payload.target.python_tag
    tag = f"{python}-{python}-linux_{payload.target.simd.machine}"
    info = payload.stem + _DIST_INFO
    contents = {f"{payload.root}/{slot.file}": slot.compiled[0].path.read_bytes() for slot in slots(payload)}
    contents[f"{info}/METADATA"] = _metadata(payload).encode()
    contents[f"{info}/WHEEL"] = wheel_text((tag,), payload.target.build).encode()
    contents.update({f"{info}/licenses/{name}": text.encode() for name, text in payload.licenses})
    return write_wheel(folder / f"{payload.stem}-{payload.target.build}-{tag}.whl", contents)


def seal(repaired: Path, payload: Payload, folder: Path, *, gpu_code: Callable[[Path], GpuCode]) -> Path:
    """Write the final wheel into ``folder``: the repaired one with a manifest of the bytes that it really holds.

    ``gpu_code`` reads the GPU code of a file; it is asked for ops that have a toolkit and run on the GPU.
    Raises :class:`GateError` when a file is missing from the repaired wheel or cannot be read.
    """
    info = payload.stem + _DIST_INFO
    with WheelFile(repaired) as wheel:
        names = [item.filename for item in wheel.infolist() if not item.is_dir()]
        contents = {name: wheel.read(name) for name in names if name != f"{info}/RECORD"}
    with TemporaryDirectory() as scratch:
        artifacts = []
        for slot in slots(payload):
            content = contents.get(f"{payload.root}/{slot.file}")
            if content is None:
                raise GateError(f"{repaired.name}: {payload.root}/{slot.file} was lost in the repair")
            path = Path(scratch) / slot.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            artifacts.append(_artifact(slot, path, gpu_code))
    manifest = Manifest(
        distribution=payload.distribution,
        version=payload.version,
        build=payload.target.build,
        label=payload.target.label,
        provenance=_provenance(payload.compiled),
        artifacts=tuple(artifacts),
    )
    contents[f"{payload.root}/{FILE_NAME}"] = manifest.to_json().encode()
    tags = sorted(str(tag) for tag in parse_wheel_filename(repaired.name)[3])
    contents[f"{info}/WHEEL"] = wheel_text(tags, payload.target.build).encode()
    return write_wheel(folder / repaired.name, contents)


def _artifact(slot: Slot, path: Path, gpu_code: Callable[[Path], GpuCode]) -> Artifact:
    first = slot.compiled[0]
    target = first.target
    elf = read_elf(path)
    content = path.read_bytes()
    torch = TorchBuild(target.torch)
    cuda = None
    if target.op.kernel == "cuda":
        if target.toolkit is None:
            raise MatrixError(f"{target.id}: a cuda kernel on a row without a toolkit")
        code = gpu_code(path)
        cuda = CudaBinding(toolkit=CudaRelease.parse(target.toolkit), sass=code.sass, ptx=code.ptx)
    newest = elf.newest("GLIBC") or (0, 0)
    return Artifact(
        file=slot.file,
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        tier="stock",
        op=target.op.name,
        accelerators=target.op.accelerators,
        module=target.op.module,
        machine=elf.machine,
        simd=target.simd,
        glibc=(newest[0], newest[1]),
        python=target.python_tag,
        torch=TorchBinding(
            minor=torch.minor,
            exact=None if torch.is_release else target.torch,
            cxx11_abi=target.cxx11_abi,
            built_with=first.torch_built_with,
        ),
        cuda=cuda,
        sources=_sources(slot.compiled),
        defines=first.defines,
        needed=elf.needed,
    )


def _sources(compiled: Iterable[Compiled]) -> tuple[SourceDigest, ...]:
    releases: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for item in compiled:
        releases.setdefault((item.closure_sha256, item.closure), []).append(item.target.deepspeed)
    return tuple(
        SourceDigest(sha256=sha256, closure=closure, deepspeed=tuple(names))
        for (sha256, closure), names in releases.items()
    )


def _provenance(compiled: Iterable[Compiled]) -> tuple[tuple[str, str], ...]:
    """One text for each key; where the ops differ, all of theirs."""
    texts: dict[str, set[str]] = {}
    for key, text in (pair for item in compiled for pair in item.provenance):
        texts.setdefault(key, set()).add(text)
    return tuple((key, "; ".join(sorted(texts[key]))) for key in sorted(texts))


def _metadata(payload: Payload) -> str:
    target = payload.target
    torches = sorted({compiled.target.torch for compiled in payload.compiled}, key=Version)
    ops = sorted({compiled.target.op.name for compiled in payload.compiled})
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {payload.distribution}",
        f"Version: {payload.version}",
        f"Summary: DeepSpeed ops built ahead of time for {target.label} and CPython {target.python}",
        "License-Expression: Apache-2.0",
        *(f"License-File: {name}" for name, _ in sorted(payload.licenses)),
        "Classifier: Operating System :: POSIX :: Linux",
        f"Requires-Python: =={target.python}.*",
        # A payload is read by the loader of its own release; the manifest's schema is no promise across releases.
        f"Requires-Dist: dsops-prebuilt=={payload.version}",
        "Description-Content-Type: text/plain",
        "",
        f"Binaries for dsops-prebuilt: {', '.join(ops)} for torch {', '.join(torches)}. There is nothing to import.",
        "",
    ]
    return "\n".join(lines)


def wheel_text(tags: Iterable[str], build: int | None = None) -> str:
    """The file WHEEL of a wheel with shared objects; ``build`` is its build number, if it has one."""
    lines = ["Wheel-Version: 1.0", "Generator: dsops_builder", "Root-Is-Purelib: false"]
    lines += [f"Tag: {tag}" for tag in tags]
    return "\n".join([*lines, *([] if build is None else [f"Build: {build}"]), ""])


def write_wheel(path: Path, contents: Mapping[str, bytes]) -> Path:
    """Write ``contents`` (member name to bytes) and their RECORD to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as scratch:
        draft = Path(scratch) / path.name
        with _Reproducible(draft, "w") as wheel:
            for name in archive_order(contents):
                wheel.writestr(name, contents[name])
        return draft.replace(path)


def archive_order(names: Iterable[str]) -> list[str]:
    """Sorted, with ``.dist-info`` behind everything else as PEP 427 recommends, and RECORD behind all."""
    return sorted(names, key=lambda name: (_DIST_INFO + "/" in name, name.endswith(_DIST_INFO + "/RECORD"), name))


def member(name: str) -> ZipInfo:
    """The zip entry of a file: nothing in it depends on the machine or the day."""
    entry = ZipInfo(name, date_time=DATE)
    entry.compress_type = ZIP_DEFLATED
    entry.create_system = _UNIX
    entry.external_attr = (stat.S_IFREG | (0o755 if name.endswith(".so") else 0o644)) << 16
    return entry


class _Reproducible(WheelFile):
    """Gives every member a constant date and mode, RECORD too, which WheelFile dates by the clock or by environment."""

    def writestr(  # type: ignore[override] # WheelFile has no compresslevel either
        self, zinfo_or_arcname: str | ZipInfo, data: SizedBuffer | str, compress_type: int | None = None
    ) -> None:
        name = zinfo_or_arcname if isinstance(zinfo_or_arcname, str) else zinfo_or_arcname.filename
        super().writestr(member(name), data, compress_type)
