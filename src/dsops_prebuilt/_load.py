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
from typing import Any, Dict, List, Optional, Protocol, Tuple

import dsops_prebuilt
from dsops_prebuilt._errors import IntegrityError, LoadError, ManifestError
from dsops_prebuilt._host import Host, detect
from dsops_prebuilt._manifest import FILE_NAME, FOLDER, PORTABLE, TIERS, Artifact, Manifest, file_sha256
from dsops_prebuilt._select import Offer, Request, Selection, default_accelerator, on_miss, only_tier, select
from dsops_prebuilt._variant import Simd


@dataclass(frozen=True)
class Payload:
    """A usable payload: its manifest, which is the one that RECORD has, and the folder of its files."""

    manifest: Manifest
    folder: Path


@dataclass(frozen=True)
class Installed:
    """What lies on ``sys.path``: the usable payloads, their offers, and one sentence for each unusable payload.

    ``damaged`` are those of ``faults`` that say a manifest is not the recorded one: then a miss is no miss.
    """

    payloads: Tuple[Payload, ...]
    faults: Tuple[str, ...]
    damaged: Tuple[str, ...] = ()

    @property
    def offers(self) -> Tuple[Offer, ...]:
        return tuple(
            Offer(artifact, payload.manifest.label, payload.manifest.build, str(payload.folder))
            for payload in self.payloads
            for artifact in payload.manifest.artifacts
        )


class Tier(Protocol):
    """A way to bind a binary; ``name`` is one of :data:`TIERS`. One other than stock is the subpackage of that name."""

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
    entries: List[Any] = sys.path  # one that is no string is ignored by the import system too
    return find_payloads(tuple(entry for entry in entries if isinstance(entry, str) and _is_place(entry)))


def _is_place(entry: str) -> bool:
    """Whether this path entry can be looked into: what is no place is ignored by the import system too.

    The working directory may have been removed, a name may be too long, a folder may not be ours to read.
    """
    try:
        return Path(entry, FOLDER).is_dir()
    except (OSError, ValueError):
        return False


@cache
def find_payloads(entries: Tuple[str, ...]) -> Installed:
    """The payloads on these path entries; one whose manifest is not in RECORD, or of another version, is a fault."""
    payloads: List[Payload] = []
    faults: List[Exception] = []
    for entry in dict.fromkeys(map(os.path.abspath, entries)):
        for path in sorted(Path(entry, FOLDER).glob(f"*/{FILE_NAME}")):
            try:
                payloads.append(Payload(_read(path), path.parent))
            except (OSError, IntegrityError, ManifestError) as error:
                faults.append(error)
    damaged = tuple(str(fault) for fault in faults if isinstance(fault, IntegrityError))
    return Installed(tuple(payloads), tuple(map(str, faults)), damaged)


def _read(path: Path) -> Manifest:
    """The manifest at ``path``. Nothing in it is believed before RECORD has its sha256.

    Raises :class:`IntegrityError`, with both hashes where there are two, :class:`ManifestError` for another version of
    the loader, and :class:`OSError` for a manifest that cannot be read.
    """
    if not path.is_file():  # reading a fifo would wait for ever
        raise IntegrityError(f"{path}: no regular file; reinstall the distribution that it came with")
    content = path.read_bytes()
    entry, label, version = path.parents[2], path.parent.name, dsops_prebuilt.__version__
    distribution = "dsops-prebuilt" if label == PORTABLE else f"dsops-prebuilt-{label}"
    record = entry / f"{distribution.replace('-', '_')}-{version}.dist-info" / "RECORD"
    again = _reinstall(distribution, version)
    if record.exists():
        found = hashlib.sha256(content).hexdigest()
        try:
            recorded = _recorded(record, path.relative_to(entry).as_posix())
        except (OSError, ValueError, csv.Error) as error:
            raise IntegrityError(f"{record}: {error}, so {path} (sha256 {found}) is not verified; {again}") from None
        if recorded != found:
            raise IntegrityError(f"{path}: its sha256 is {found}, and {record} has {recorded or 'none'}; {again}")
    manifest = Manifest.from_json(content, str(path))
    if manifest.version != version:
        raise ManifestError(
            f"{path}: {manifest.distribution} {manifest.version} does not belong to dsops-prebuilt {version}; {again}"
        )
    if not record.exists():
        raise IntegrityError(f"{record}: not there, so {path} is not verified; {again}")
    return manifest


def _recorded(record: Path, name: str) -> str:
    """The hexadecimal sha256 that RECORD has for a file; a digest that is no base64 as it stands; "" for none."""
    rows = {row[0]: row[1] for row in csv.reader(record.read_text("utf-8").splitlines()) if row[1:]}
    algorithm, _, digest = rows.get(name, "").partition("=")
    try:
        # RECORD has urlsafe base64 without its padding (Binary distribution format, "Signed wheel files").
        decoded = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    except ValueError:
        return digest
    return decoded if algorithm == "sha256" else ""


def refuse_damaged(found: Installed) -> None:
    """Raise :class:`IntegrityError` when nothing serves a request and a payload that might have is damaged."""
    if found.damaged:
        raise IntegrityError(found.damaged[0])


def _reinstall(distribution: str, version: str) -> str:
    return f"run: pip install --force-reinstall --no-deps {distribution}=={version}"


def verify(offer: Offer, found: Installed) -> Path:
    """The path of the offer's file, proved to be the one that its manifest recorded.

    Raises :class:`IntegrityError`, with the path and both hashes, when it is another or cannot be read.
    """
    payload = next(item for item in found.payloads if str(item.folder) == offer.folder)
    again = _reinstall(payload.manifest.distribution, payload.manifest.version)
    path = payload.folder / offer.artifact.file
    try:
        if path.exists() and not path.is_file():  # reading a fifo would wait for ever
            raise IntegrityError(f"{path}: no regular file; {again}")
        actual = file_sha256(path)
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    if actual != offer.artifact.sha256:
        raise IntegrityError(f"{path}: its sha256 is {actual}, and its manifest has {offer.artifact.sha256}; {again}")
    return path


_LOCK = threading.RLock()
_OPENED: Dict[Tuple[str, str], ModuleType] = {}
if hasattr(os, "register_at_fork"):
    # A child that was forked while another thread held the lock has no such thread, and would wait for ever.
    os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.RLock()))


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


def has_reference(request: Request, host: Host) -> bool:
    """Whether the reference tier has the op here and may be used: ``DSOPS_TIER`` or, on a miss, ``DSOPS_ON_MISS``."""
    allowed = (only_tier(host) or on_miss(host)) == "reference"
    return allowed and importlib.import_module("dsops_prebuilt.reference").objection(request, host) is None


def serve(selection: Selection, host: Host, found: Installed) -> Optional[ModuleType]:
    """The module of the chosen artifact, else of the reference where the settings allow it; None is a miss.

    Raises the errors of :func:`open_offer`, and :class:`IntegrityError` where a damaged payload may be why none fits.
    """
    chosen = selection.chosen
    if chosen is not None:
        module = open_offer(chosen, found)
        notices = [f"{chosen} is used, and a payload cannot be: {fault}" for fault in found.faults]
        if host.setting("DSOPS_SIMD"):
            notices.append(f"DSOPS_SIMD={host.setting('DSOPS_SIMD')} is in force; other ranks must use the same level")
        for notice in notices:
            importlib.import_module("dsops_prebuilt._notice").tell_once(notice)
        if chosen.artifact.tier == "portable" and host.processor is Simd.X86_64:
            importlib.import_module("dsops_prebuilt.reference._advice").advise(chosen.artifact.op, module)
        return module
    if only_tier(host) != "reference" and on_miss(host) != "jit":
        refuse_damaged(found)
    if has_reference(selection.request, host):
        served: ModuleType = importlib.import_module("dsops_prebuilt.reference").serve(selection.request, host)
        return served
    return None


def choose(op: str, accelerator: Optional[str] = None, host: Optional[Host] = None) -> Selection:
    """The selection among the installed payloads; see :func:`dsops_prebuilt.explain`."""
    machine = host or detect()
    return select(installed().offers, Request(op, accelerator or default_accelerator(machine)), machine)


def load(op: str, accelerator: Optional[str] = None, host: Optional[Host] = None) -> ModuleType:
    """Choose, verify, open; see :func:`dsops_prebuilt.load`."""
    machine = host or detect()
    selection = choose(op, accelerator, machine)
    module = serve(selection, machine, installed())
    if module is None:
        raise importlib.import_module("dsops_prebuilt._explain").miss(selection, machine, installed())
    return module
