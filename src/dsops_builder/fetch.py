"""Bring pinned files into the cache: Debian packages by path and sha256, sdists and wheels by version through pip."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pooch
import requests
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedRepoVersionError,
)

from dsops_builder.errors import CommandError, FetchError
from dsops_builder.model import Package, SourceTree, TorchOrigin
from dsops_builder.process import Runner

pooch.get_logger().setLevel("WARNING")

_PATIENCE = 60
"""Seconds to wait for a server that says nothing; requests by itself waits for ever."""
# What the simple API's client has for a server that does not answer as an index does; ValueError is for other content.
_NO_INDEX = (requests.RequestException, NoSuchProjectError, UnsupportedRepoVersionError, ValueError)
_INDEX_URL = re.compile(r"^(:env:|global)\.index-url='(\S+)'$", re.MULTILINE)
_ARCHIVE = re.compile(r"^'(?P<base>\S+?)/dists/[^/']+/", re.MULTILINE)


class DebianMirror:
    """Debian packages, each pinned by sha256, kept in ``cache/debian``.

    ``base`` is the mirror's address (``DSOPS_DEBIAN_MIRROR``); None asks this machine's apt configuration, and only
    when a package is not in the cache.
    """

    def __init__(self, base: str | None, cache: Path, runner: Runner) -> None:
        self._base = base
        self._folder = cache / "debian"
        self._runner = runner

    def fetch(self, package: Package) -> Path:
        """Return the package's file. Raises :class:`FetchError` for no network, no such file, or another hash."""
        name = Path(package.path).name
        path = self._folder / f"{package.sha256[:12]}-{name}"
        # A file that was cut short, or changed, since it was downloaded is downloaded again.
        if path.exists() and sha256_of(path) == package.sha256:
            return path
        url = f"{self._mirror()}/{package.path}"
        try:
            pooch.retrieve(
                url,
                known_hash=f"sha256:{package.sha256}",
                fname=path.name,
                path=self._folder,
                progressbar=sys.stderr.isatty(),
            )
        except (requests.RequestException, OSError) as error:
            raise FetchError(
                f"{url}: {error}\nIf this mirror no longer has the file, set DSOPS_DEBIAN_MIRROR to one that does"
            ) from error
        except ValueError as error:  # pooch's word for a hash that differs, the file is gone, and for no address
            raise FetchError(
                f"{url}: {error}\nNothing was kept. build_matrix.yaml has the sha256 expected; "
                "DSOPS_DEBIAN_MIRROR is an http or https address"
            ) from error
        return path

    def unpack(self, packages: Iterable[Package], folder: Path) -> None:
        """Unpack every package into one tree, without root and without running its scripts."""
        for package in packages:
            self._runner.run(["dpkg-deb", "-x", str(self.fetch(package)), str(folder)])

    def _mirror(self) -> str:
        if not self._base:
            self._base = self._apt_mirror()
        return self._base.rstrip("/")

    def _apt_mirror(self) -> str:
        # Printing what an update would fetch needs no lists, no root and no network (apt-get(8), --print-uris).
        try:
            printed = self._runner.run(["apt-get", "--print-uris", "update"])
        except CommandError as error:
            raise FetchError(f"no Debian mirror: set DSOPS_DEBIAN_MIRROR, or run on Debian\n{error}") from error
        bases = [found["base"] for found in _ARCHIVE.finditer(printed)]
        for base in bases:
            if base.endswith("/debian"):
                return base
        raise FetchError(
            "no Debian mirror in this machine's apt configuration "
            f"(found: {', '.join(bases) or 'none'}); set DSOPS_DEBIAN_MIRROR"
        )


class Sdists:
    """DeepSpeed's releases as sdists, each pinned by sha256 in ``trees``, kept in ``cache/sdist``.

    They come from the index that pip is configured for. pip itself would run each one's setup.py to learn its name: 5 s
    a release, and there are dozens.
    """

    def __init__(self, trees: Mapping[str, SourceTree], cache: Path, runner: Runner) -> None:
        self.trees = trees
        self._folder = cache / "sdist"
        self._runner = runner
        self._packages: dict[str, DistributionPackage] | None = None

    def fetch(self, version: str) -> Path:
        """Return the release's sdist. Raises :class:`FetchError` for no index, no such release, or another hash."""
        path = self._folder / f"deepspeed-{version}.tar.gz"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with PyPISimple(self._endpoint) as client, tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                draft = Path(scratch) / path.name
                try:
                    if self._packages is None:
                        page = client.get_project_page("deepspeed", timeout=_PATIENCE)
                        self._packages = {p.version or "": p for p in page.packages if p.package_type == "sdist"}
                    client.download_package(self._packages[version], draft, verify=False, timeout=_PATIENCE)
                except KeyError:
                    raise FetchError(f"{self._endpoint} has no sdist of DeepSpeed {version}") from None
                except (*_NO_INDEX, OSError) as error:
                    raise FetchError(
                        f"DeepSpeed {version} cannot be downloaded from {self._endpoint}: {error}\n"
                        "Check the network and pip's index-url"
                    ) from error
                draft.replace(path)
        _check(path, (self.trees[version].sdist_sha256,))
        return path

    def unpack(self, version: str, folder: Path) -> Path:
        """Unpack the release below ``folder`` and return its tree."""
        with tarfile.open(self.fetch(version)) as archive:
            # Debian 12's Python 3.11.2 has no extraction filters (3.11.4); with them, this is the strict one.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder)  # noqa: S202  the sha256 of the sdist is pinned
        return folder / f"deepspeed-{version}"

    def license_text(self, version: str) -> str:
        """The licence that the release carries. Raises :class:`FetchError` when it carries none."""
        with tarfile.open(self.fetch(version)) as archive:
            try:
                found = archive.extractfile(f"deepspeed-{version}/LICENSE")
            except KeyError:
                found = None
            if found is None:
                raise FetchError(f"the sdist of DeepSpeed {version} has no LICENSE")
            return found.read().decode()

    @cached_property
    def _endpoint(self) -> str:
        """The index of pip: of the environment, else of its files, else the default (pip's manual, "Configuration")."""
        printed = self._runner.run(_pip("config", "list"))
        found = dict(_INDEX_URL.findall(printed))
        return found.get(":env:") or found.get("global") or PYPI_SIMPLE_ENDPOINT


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedWheel:
    """A wheel in the cache, and the sha256 of the file."""

    path: Path
    sha256: str


def fetch_torch(
    origin: TorchOrigin, python: Path, accepted: tuple[str, ...], cache: Path, runner: Runner
) -> FetchedWheel:
    """Return the torch wheel of ``origin`` for the interpreter ``python``.

    ``accepted`` are the sha256 of build_matrix.yaml; they are checked for the default index. PyTorch's own indexes
    publish the hash of each file, and pip checks that one. Raises :class:`FetchError`.
    """
    version = runner.run([str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    folder = cache / "torch" / f"{origin.requirement.replace('==', '-')}-cp{version.replace('.', '')}"
    kept = sorted(folder.glob("*.whl"))
    if not kept:
        index = [] if origin.index is None else ["--index-url", origin.index]
        platform = ["--python-version", version, "--only-binary", ":all:"]
        command = _pip("download", "--no-deps", *platform, *index, origin.requirement)
        kept = [_download(command, folder, runner, origin.requirement)]
    found = _check(kept[0], accepted if origin.index is None else ())
    return FetchedWheel(path=kept[0], sha256=found)


def _pip(*words: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


def _download(command: list[str], target: Path, runner: Runner, what: str) -> Path:
    """Run pip into a temporary folder and move the one file that it left to ``target``, a folder or a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            runner.run([*command, "--dest", scratch])
        except CommandError as error:
            raise FetchError(f"{what} cannot be downloaded; check the network and pip's index\n{error}") from error
        (found,) = Path(scratch).iterdir()
        final = target if target.name == found.name else target / found.name
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found, final)
    return final


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file that may be of many gigabytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check(path: Path, accepted: tuple[str, ...]) -> str:
    """The file's sha256; a file that is not one of ``accepted``, where there are any, is removed and refused."""
    found = sha256_of(path)
    if accepted and found not in accepted:
        path.unlink()
        raise FetchError(
            f"{path}: sha256 {found}, and build_matrix.yaml accepts {' or '.join(accepted)}; the file was removed"
        )
    return found
