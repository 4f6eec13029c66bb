"""Read and write ``manifest.json``: every artifact of a payload with everything that decides where it may be loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, Optional, Tuple, Union

from dsops_prebuilt._errors import IntegrityError, ManifestError, UsageError
from dsops_prebuilt._variant import CudaRelease, GpuArch, Simd

SCHEMA = 1
FILE_NAME = "manifest.json"
FOLDER = "dsops_prebuilt_payloads"
"""Folder on a ``sys.path`` entry whose subfolders, one a label, each hold one payload."""
TIERS = ("stock", "portable", "reference")
"""How an op is bound, best first; at one SIMD level the first two give the same bits, and the last has no binary."""
PORTABLE = "portable"
"""Label of the payload that comes with the loader, in the distribution ``dsops-prebuilt`` itself."""


class NoJsonError(IntegrityError, ManifestError):
    """A manifest that is no JSON: no release wrote it so, which makes it a damaged file whatever RECORD says."""


@dataclass(frozen=True)
class TorchBinding:
    """What a stock artifact needs of torch.

    ``minor`` binds (``2.7``); ``exact`` is the one ``torch.__version__`` accepted when the artifact was built for a
    nightly or vendor build, else None; ``built_with`` is the version whose headers were read, for the record.
    """

    minor: str
    exact: Optional[str]
    cxx11_abi: bool
    built_with: str


@dataclass(frozen=True)
class CudaBinding:
    """What an artifact that holds GPU code needs of CUDA: its toolkit's release, and the code inside its fatbin."""

    toolkit: CudaRelease
    sass: Tuple[GpuArch, ...]
    ptx: Tuple[GpuArch, ...]


@dataclass(frozen=True)
class SourceDigest:
    """One set of DeepSpeed sources that an artifact stands for.

    ``closure`` names files below ``csrc``: the op's sources in the builder's order, then every header that the
    compiler read, sorted. ``sha256`` is :func:`closure_sha256` of them. ``deepspeed`` lists the releases seen with it,
    for the reader; only the digest binds.
    """

    sha256: str
    closure: Tuple[str, ...]
    deepspeed: Tuple[str, ...]


@dataclass(frozen=True)
class Artifact:
    """One shared object and every key that binds it. A key that is None does not bind.

    ``file`` is relative to the manifest's folder; ``module`` is the dotted name whose last part is the ``PyInit_``
    suffix; ``accelerators`` are the values of ``get_accelerator()._name`` under which DeepSpeed's builder of this
    name is this kernel; ``glibc`` is the newest glibc symbol version used; ``defines`` are the macros that
    DeepSpeed's builder adds and that are not of the machine; ``needed`` is DT_NEEDED.
    """

    file: str
    sha256: str
    size: int
    tier: str
    op: str
    accelerators: Tuple[str, ...]
    module: str
    machine: str
    simd: Simd
    glibc: Tuple[int, int]
    python: Optional[str]
    torch: Optional[TorchBinding]
    cuda: Optional[CudaBinding]
    sources: Tuple[SourceDigest, ...]
    defines: Tuple[str, ...]
    needed: Tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """One payload: where it comes from, how it was made, what it holds.

    ``provenance`` is free text by key (compiler, toolkit, origin of torch's headers, ...), for people and reports;
    nothing is decided by it.
    """

    distribution: str
    version: str
    build: int
    label: str
    provenance: Tuple[Tuple[str, str], ...]
    artifacts: Tuple[Artifact, ...]

    @property
    def dist_info(self) -> str:
        """Name of the folder that holds RECORD (Binary distribution format, "File name convention")."""
        return f"{self.distribution.replace('-', '_')}-{self.version}.dist-info"

    def to_json(self) -> str:
        """The file's text; :meth:`from_json` is the inverse."""
        return json.dumps({"schema": SCHEMA, **_plain(asdict(self))}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: Union[str, bytes], origin: str) -> Manifest:
        """Parse the file's text. ``origin`` is the path that errors name.

        Raises :class:`ManifestError` for another schema version, or a missing, unknown or mistyped key, with the
        key's path in the file, and :class:`NoJsonError`, which is one too, for text that is no JSON.
        """
        try:
            return cls._of(json.loads(text), origin)
        except (ValueError, RecursionError) as error:
            raise NoJsonError(f"{origin}: not JSON: {error}; reinstall the payload") from None

    @classmethod
    def _of(cls, raw: Any, origin: str) -> Manifest:
        reader = _Reader(origin)
        reader.require(isinstance(raw, dict), "$", "an object", raw)
        if raw.get("schema") != SCHEMA:
            raise ManifestError(
                f"{origin}: schema {raw.get('schema')!r} is not {SCHEMA}, the one this dsops-prebuilt reads; "
                "install the same version of dsops-prebuilt and of its payloads"
            )
        return reader.manifest({key: value for key, value in raw.items() if key != "schema"})


def closure_sha256(csrc: Path, closure: Iterable[str]) -> str:
    """Digest of a source closure: for each name in order, the name, the size in bytes and the bytes.

    Independent of where ``csrc`` lies. Raises :class:`OSError` when a file of the closure is not there.
    """
    digest = hashlib.sha256()
    for name in closure:
        content = (csrc / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes, which are read in one piece: artifacts are of a few MB."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"major", "minor"}:
            return str(CudaRelease(**value))
        if set(value) == {"major", "minor", "suffix", "ptx"}:
            return str(GpuArch(**value))
        return {key: dict(item) if key == "provenance" else _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Simd) else value


@cache
def _names(kind: type) -> FrozenSet[str]:
    return frozenset(item.name for item in fields(kind))


class _Reader:
    """Turns decoded JSON into the frozen values, naming the path of whatever does not fit."""

    def __init__(self, origin: str) -> None:
        self._origin = origin

    def require(self, holds: bool, where: str, expected: str, found: object) -> None:
        if not holds:
            raise self._unexpected(where, expected, found)

    def _unexpected(self, where: str, expected: str, found: object) -> ManifestError:
        return ManifestError(f"{self._origin}: {where}: expected {expected}, found {found!r}; reinstall the payload")

    def keys(self, raw: Any, kind: type, where: str) -> Dict[str, Any]:
        self.require(isinstance(raw, dict), where, "an object", raw)
        names = _names(kind)
        if raw.keys() != names:
            raise self._unexpected(where, f"the keys {', '.join(sorted(names))}", sorted(raw))
        result: Dict[str, Any] = raw
        return result

    def text(self, raw: Any, where: str) -> str:
        # Nothing that a path cannot have, or a terminal should not get.
        self.require(isinstance(raw, str) and raw.isprintable(), where, "a printable string", raw)
        return str(raw)

    def number(self, raw: Any, where: str) -> int:
        self.require(isinstance(raw, int) and not isinstance(raw, bool), where, "an integer", raw)
        return int(raw)

    def texts(self, raw: Any, where: str) -> Tuple[str, ...]:
        self.require(isinstance(raw, list), where, "a list of strings", raw)
        if not all(
            isinstance(item, str) and item.isprintable() for item in raw
        ):  # a path for each of hundreds would be half of the time
            raw = [self.text(item, f"{where}[{index}]") for index, item in enumerate(raw)]
        return tuple(raw)

    def parsed(self, parse: Any, raw: Any, where: str) -> Any:
        text = self.text(raw, where)
        try:
            return parse(text)
        except UsageError as error:
            raise ManifestError(f"{self._origin}: {where}: {error}; reinstall the payload") from None

    def manifest(self, raw: Dict[str, Any]) -> Manifest:
        self.keys(raw, Manifest, "$")
        self.require(isinstance(raw["provenance"], dict), "$.provenance", "an object", raw["provenance"])
        self.require(isinstance(raw["artifacts"], list), "$.artifacts", "a list", raw["artifacts"])
        return Manifest(
            distribution=self.text(raw["distribution"], "$.distribution"),
            version=self.text(raw["version"], "$.version"),
            build=self.number(raw["build"], "$.build"),
            label=self.text(raw["label"], "$.label"),
            provenance=tuple(
                (key, self.text(value, f"$.provenance.{key}")) for key, value in sorted(raw["provenance"].items())
            ),
            artifacts=tuple(self.artifact(item, f"$.artifacts[{i}]") for i, item in enumerate(raw["artifacts"])),
        )

    def artifact(self, raw: Any, where: str) -> Artifact:
        raw = self.keys(raw, Artifact, where)
        glibc = raw["glibc"]
        file = self.text(raw["file"], f"{where}.file")
        inside = file and not set(file.split("/")) & {"", ".", ".."}
        self.require(bool(inside), f"{where}.file", "a path below the manifest's folder", file)
        tiers = TIERS[:-1]
        self.require(raw["tier"] in tiers, f"{where}.tier", f"one of {', '.join(tiers)}", raw["tier"])
        pair = isinstance(glibc, list) and len(glibc) == 2  # noqa: PLR2004 - major, minor
        self.require(pair, f"{where}.glibc", "two integers", glibc)
        self.require(isinstance(raw["sources"], list), f"{where}.sources", "a list", raw["sources"])
        python = raw["python"]
        return Artifact(
            file=file,
            sha256=self.text(raw["sha256"], f"{where}.sha256"),
            size=self.number(raw["size"], f"{where}.size"),
            tier=self.text(raw["tier"], f"{where}.tier"),
            op=self.text(raw["op"], f"{where}.op"),
            accelerators=self.texts(raw["accelerators"], f"{where}.accelerators"),
            module=self.text(raw["module"], f"{where}.module"),
            machine=self.text(raw["machine"], f"{where}.machine"),
            simd=self.parsed(Simd.parse, raw["simd"], f"{where}.simd"),
            glibc=(self.number(glibc[0], f"{where}.glibc[0]"), self.number(glibc[1], f"{where}.glibc[1]")),
            python=None if python is None else self.text(python, f"{where}.python"),
            torch=None if raw["torch"] is None else self.torch(raw["torch"], f"{where}.torch"),
            cuda=None if raw["cuda"] is None else self.cuda(raw["cuda"], f"{where}.cuda"),
            sources=tuple(self.source(item, f"{where}.sources[{i}]") for i, item in enumerate(raw["sources"])),
            defines=self.texts(raw["defines"], f"{where}.defines"),
            needed=self.texts(raw["needed"], f"{where}.needed"),
        )

    def torch(self, raw: Any, where: str) -> TorchBinding:
        raw = self.keys(raw, TorchBinding, where)
        exact = raw["exact"]
        self.require(isinstance(raw["cxx11_abi"], bool), f"{where}.cxx11_abi", "true or false", raw["cxx11_abi"])
        return TorchBinding(
            minor=self.text(raw["minor"], f"{where}.minor"),
            exact=None if exact is None else self.text(exact, f"{where}.exact"),
            cxx11_abi=raw["cxx11_abi"],
            built_with=self.text(raw["built_with"], f"{where}.built_with"),
        )

    def cuda(self, raw: Any, where: str) -> CudaBinding:
        raw = self.keys(raw, CudaBinding, where)
        archs = {
            key: tuple(
                self.parsed(GpuArch.parse, item, f"{where}.{key}[{i}]")
                for i, item in enumerate(self.texts(raw[key], f"{where}.{key}"))
            )
            for key in ("sass", "ptx")
        }
        return CudaBinding(
            toolkit=self.parsed(CudaRelease.parse, raw["toolkit"], f"{where}.toolkit"),
            sass=archs["sass"],
            ptx=archs["ptx"],
        )

    def source(self, raw: Any, where: str) -> SourceDigest:
        raw = self.keys(raw, SourceDigest, where)
        return SourceDigest(
            sha256=self.text(raw["sha256"], f"{where}.sha256"),
            closure=self.texts(raw["closure"], f"{where}.closure"),
            deepspeed=self.texts(raw["deepspeed"], f"{where}.deepspeed"),
        )
