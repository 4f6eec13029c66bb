"""Put the portable tier of one machine into the loader's wheel; the same input, the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from dsops_builder.elf import read_elf
from dsops_builder.errors import GateError
from dsops_builder.portable import PortableArtifact
from dsops_builder.wheel import PAYLOADS, wheel_text, write_wheel
from dsops_prebuilt import __version__
from dsops_prebuilt._manifest import FILE_NAME, Artifact, Manifest

LABEL = "portable"
_INFO = f"dsops_prebuilt-{__version__}.dist-info"
_ROOT = f"{PAYLOADS}/{LABEL}"
_LICENSE = "LICENSE.deepspeed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What goes into one machine's wheel: the loader's wheel, the artifacts, and DeepSpeed's licence.

    ``provenance`` is for the manifest: pairs of a key and a text.
    """

    loader: Path
    artifacts: tuple[PortableArtifact, ...]
    license_text: str
    provenance: tuple[tuple[str, str], ...]

    @property
    def machine(self) -> str:
        """``x86_64`` or ``aarch64``; the same for all artifacts."""
        return self.artifacts[0].simd.machine


def pack(contents: Contents, folder: Path) -> Path:
    """Write the raw wheel, tagged ``linux_MACHINE``, into ``folder``. It has no manifest: :func:`seal` writes that."""
    members = _members(contents.loader)
    metadata = f"{_INFO}/METADATA"
    members[metadata] = _with_license(members[metadata])
    members[f"{_INFO}/licenses/{_LICENSE}"] = contents.license_text.encode()
    members.update({f"{_ROOT}/{one.file}": one.path.read_bytes() for one in contents.artifacts})
    tag = f"py3-none-linux_{contents.machine}"
    members[f"{_INFO}/WHEEL"] = wheel_text((tag,)).encode()
    return write_wheel(folder / f"dsops_prebuilt-{__version__}-{tag}.whl", members)


def seal(repaired: Path, contents: Contents, folder: Path) -> Path:
    """Write the final wheel into ``folder``: the repaired one with a manifest of the bytes that it really holds.

    Raises :class:`GateError` when a file is missing from the repaired wheel or cannot be read.
    """
    members = _members(repaired)
    with TemporaryDirectory() as scratch:
        artifacts = tuple(_artifact(one, members, Path(scratch), repaired.name) for one in contents.artifacts)
    manifest = Manifest(
        distribution="dsops-prebuilt",
        version=__version__,
        build=1,
        label=LABEL,
        provenance=contents.provenance,
        artifacts=artifacts,
    )
    members[f"{_ROOT}/{FILE_NAME}"] = manifest.to_json().encode()
    tags = sorted(str(tag) for tag in parse_wheel_filename(repaired.name)[3])
    members[f"{_INFO}/WHEEL"] = wheel_text(tags).encode()
    return write_wheel(folder / repaired.name, members)


def _members(wheel: Path) -> dict[str, bytes]:
    with WheelFile(wheel) as archive:
        names = [item.filename for item in archive.infolist() if not item.is_dir()]
        return {name: archive.read(name) for name in names if name != f"{_INFO}/RECORD"}


def _with_license(metadata: bytes) -> bytes:
    """METADATA with one more ``License-File`` (Core metadata 2.4), behind those that it has."""
    head, blank, description = metadata.decode().partition("\n\n")
    lines = head.split("\n")
    last = max(number for number, line in enumerate(lines) if line.startswith("License-File: "))
    lines.insert(last + 1, f"License-File: {_LICENSE}")
    return ("\n".join(lines) + blank + description).encode()


def _artifact(one: PortableArtifact, members: Mapping[str, bytes], scratch: Path, wheel: str) -> Artifact:
    content = members.get(f"{_ROOT}/{one.file}")
    if content is None:
        raise GateError(f"{wheel}: {_ROOT}/{one.file} was lost in the repair")
    path = scratch / one.path.name
    path.write_bytes(content)
    elf = read_elf(path)
    newest = elf.newest("GLIBC") or (0, 0)
    return Artifact(
        file=one.file,
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        tier="portable",
        op=one.op.name,
        accelerators=one.op.accelerators,
        module=one.op.module,
        machine=elf.machine,
        simd=one.simd,
        glibc=(newest[0], newest[1]),
        python=None,
        torch=None,
        cuda=None,
        sources=one.sources,
        defines=(),
        needed=elf.needed,
    )
