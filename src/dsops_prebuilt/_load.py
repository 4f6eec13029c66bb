"""Find the installed payloads, have an artifact selected, verify its file and open it, once per process."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import os
import sys
import threading
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Dict, List, Optional, Protocol, Tuple

import dsops_prebuilt
from dsops_prebuilt._errors import IntegrityError, LoadError, ManifestError
from dsops_prebuilt._host import Host, detect
from dsops_prebuilt._manifest import FILE_NAME, FOLDER, TIERS, Artifact, Manifest, file_sha256
from dsops_prebuilt._select import Offer, Request, Selection, default_accelerator, select


@dataclass(frozen=True)
class Payload:
    """A usable payload: its manifest, the folder of its files, and the sha256 of the manifest's text as parsed."""

    manifest: Manifest
    folder: Path
    sha256: str


@dataclass(frozen=True)
class Installed:
    """What lies on ``sys.path``: the usable payloads, their offers, and one sentence for each unusable payload."""

    payloads: Tuple[Payload, ...]
    faults: Tuple[str, ...]

    @property
    def offers(self) -> Tuple[Offer, ...]:
        return tuple(
            Offer(artifact, payload.manifest.label, payload.manifest.build, str(payload.folder))
            for payload in self.payloads
            for artifact in payload.manifest.artifacts
        )


class Tier(Protocol):
    """A way to bind a binary; ``name`` is one of :data:`TIERS`. Those other than stock are subpackages of that name."""

    name: str

    @property
    def rank(self) -> int:
        """Place in :data:`TIERS`; of two artifacts of one SIMD level, the lower rank is chosen."""

    def open(self, artifact: Artifact, path: Path) -> ModuleType:
        """The module of a verified file, with a ``__file__``. Raises :class:`ImportError` or :class:`OSError`."""


class StockTier:
    """DeepSpeed's own pybind11 extension: an ordinary extension module under its ahead-of-time name."""

    name = "stock"
    rank = TIERS.index("stock")

    def open(self, artifact: Artifact, path: Path) -> ModuleType:
        """See :class:`Tier`. The ``PyInit_`` function's suffix is the last part of ``artifact.module``."""
        loader = ExtensionFileLoader(artifact.module, str(path))
        spec = spec_from_file_location(artifact.module, path, loader=loader)
        if spec is None:
            raise ImportError(f"no import spec for {path}")
        module = module_from_spec(spec)
        loader.exec_module(module)
        return module


def installed() -> Installed:
    """The payloads on ``sys.path``, by a plain directory listing that is made once for each state of ``sys.path``."""
    return find_payloads(tuple(sys.path))


@cache
def find_payloads(entries: Tuple[str, ...]) -> Installed:
    """The payloads on these path entries; a payload of another version than this package is a fault."""
    payloads: List[Payload] = []
    faults: List[str] = []
    for entry in dict.fromkeys(map(os.path.abspath, entries)):
        for path in sorted(Path(entry, FOLDER).glob(f"*/{FILE_NAME}")):
            try:
                text = path.read_bytes()
                manifest = Manifest.from_json(text.decode(), str(path))
            except (OSError, ManifestError, UnicodeDecodeError) as error:
                faults.append(str(error) if isinstance(error, ManifestError) else f"{path}: {error}")
                continue
            if manifest.version != dsops_prebuilt.__version__:
                faults.append(
                    f"{path}: {manifest.distribution} {manifest.version} does not belong to dsops-prebuilt "
                    f"{dsops_prebuilt.__version__}; "
                    f"run: pip install --upgrade {manifest.distribution}=={dsops_prebuilt.__version__}"
                )
                continue
            payloads.append(Payload(manifest, path.parent, hashlib.sha256(text).hexdigest()))
    return Installed(tuple(payloads), tuple(faults))


def verify(offer: Offer, found: Installed) -> Path:
    """The path of the offer's file, proved to be the recorded one: manifest against RECORD, file against manifest.

    Raises :class:`IntegrityError`, with the path and both hashes, when either differs or RECORD does not tell.
    """
    payload = next(item for item in found.payloads if str(item.folder) == offer.folder)
    manifest = payload.manifest
    again = f"run: pip install --force-reinstall --no-deps {manifest.distribution}=={manifest.version}"
    entry = payload.folder.parent.parent
    record = entry / manifest.dist_info / "RECORD"
    name = (payload.folder / FILE_NAME).relative_to(entry).as_posix()
    try:
        with record.open(encoding="utf-8", newline="") as lines:
            rows = {row[0]: row[1] for row in csv.reader(lines) if row[1:]}
    except OSError as error:
        raise IntegrityError(
            f"{record}: cannot be read ({error.strerror}), so {name} is not verified; {again}"
        ) from None
    algorithm, _, digest = rows.get(name, "").partition("=")
    # RECORD has urlsafe base64 without its padding (Binary distribution format, "Signed wheel files").
    recorded = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    if algorithm != "sha256" or recorded != payload.sha256:
        theirs = recorded or "none"
        raise IntegrityError(f"{entry / name}: its sha256 is {payload.sha256}, and {record} has {theirs}; {again}")
    path = payload.folder / offer.artifact.file
    try:
        actual = file_sha256(path)
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    if actual != offer.artifact.sha256:
        raise IntegrityError(f"{path}: its sha256 is {actual}, and its manifest has {offer.artifact.sha256}; {again}")
    return path


_LOCK = threading.RLock()
_OPENED: Dict[Tuple[str, str], ModuleType] = {}


def open_offer(offer: Offer, found: Installed) -> ModuleType:
    """Verify and open the offer's file; the same module again for the same file, from whichever thread.

    Raises :class:`IntegrityError` and, where the dynamic loader or the module's initialiser fails, :class:`LoadError`.
    """
    key = (offer.folder, offer.artifact.file)
    with _LOCK:
        if key not in _OPENED:
            path = verify(offer, found)
            try:
                _OPENED[key] = _tier(offer.artifact.tier).open(offer.artifact, path)
            except (ImportError, OSError) as error:
                raise LoadError(
                    f"{path}: chosen and intact, but it cannot be opened: {error}. "
                    f"Run `dsops explain {offer.artifact.op}` and report its output; "
                    "DSOPS_DISABLE=1 lets DeepSpeed compile the op instead"
                ) from error
        return _OPENED[key]


def _tier(name: str) -> Tier:
    tier: Tier = StockTier() if name == "stock" else importlib.import_module(f"dsops_prebuilt.{name}").TIER
    return tier


def choose(op: str, accelerator: Optional[str] = None, host: Optional[Host] = None) -> Selection:
    """The selection among the installed payloads; see :func:`dsops_prebuilt.explain`."""
    machine = host or detect()
    return select(installed().offers, Request(op, accelerator or default_accelerator(machine)), machine)


def load(op: str, accelerator: Optional[str] = None, host: Optional[Host] = None) -> ModuleType:
    """Choose, verify, open; see :func:`dsops_prebuilt.load`."""
    machine = host or detect()
    selection = choose(op, accelerator, machine)
    if selection.chosen is None:
        raise importlib.import_module("dsops_prebuilt._explain").miss(selection, machine, installed())
    return open_offer(selection.chosen, installed())
