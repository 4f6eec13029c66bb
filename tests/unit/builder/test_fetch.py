"""Downloads: what is pinned is checked, and nothing wrong stays in the cache."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsops_builder.cache import fresh_folder
from dsops_builder.errors import CommandError, FetchError
from dsops_builder.fetch import DebianMirror, fetch_sdist, fetch_torch
from dsops_builder.model import Package, TorchOrigin

POOL = "pool/main/a/a/a_1_amd64.deb"


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def mirror_folder(tmp_path: Path) -> Path:
    file = tmp_path / "mirror" / POOL
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a package")
    return tmp_path / "mirror"


@pytest.fixture
def mirror(mirror_folder: Path) -> Iterator[str]:
    """A mirror on the loopback address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(mirror_folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class FakeRunner:
    """Answers each command by the first word that its table knows; pip's downloads leave a file."""

    def __init__(self, answers: Mapping[str, str] | None = None, *, file: str = "", content: bytes = b"") -> None:
        self.answers = dict(answers or {})
        self.file, self.content = file, content
        self.commands: list[list[str]] = []

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,  # noqa: ARG002
        env: Mapping[str, str] | None = None,  # noqa: ARG002
        log: Path | None = None,  # noqa: ARG002
    ) -> str:
        """See Runner."""
        self.commands.append(list(command))
        for word, answer in self.answers.items():
            if word in command:
                return answer
        if "download" in command and self.file:
            (Path(command[command.index("--dest") + 1]) / self.file).write_bytes(self.content)
            return ""
        raise CommandError(f"{command[0]}: not here")


def package(content: bytes = b"a package") -> Package:
    return Package(path=POOL, sha256=hashlib.sha256(content).hexdigest())


def test_a_package_is_downloaded_once(mirror: str, mirror_folder: Path, tmp_path: Path) -> None:
    source = DebianMirror(mirror, tmp_path / "cache", FakeRunner())
    assert source.fetch(package()).read_bytes() == b"a package"
    (mirror_folder / POOL).unlink()
    assert source.fetch(package()).read_bytes() == b"a package"


def test_a_package_that_was_damaged_in_the_cache_is_downloaded_again(mirror: str, tmp_path: Path) -> None:
    source = DebianMirror(mirror, tmp_path / "cache", FakeRunner())
    source.fetch(package()).write_bytes(b"a pack")
    assert source.fetch(package()).read_bytes() == b"a package"


def test_a_package_with_another_hash_is_refused_and_not_kept(mirror: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="does not match the known hash") as refusal:
        DebianMirror(mirror, tmp_path / "cache", FakeRunner()).fetch(package(b"another"))
    assert POOL in str(refusal.value)
    assert list((tmp_path / "cache").rglob("*.deb")) == []


def test_a_mirror_without_the_file_names_the_way_out(mirror: str, mirror_folder: Path, tmp_path: Path) -> None:
    (mirror_folder / POOL).unlink()
    with pytest.raises(FetchError, match=r"404.*\nIf this mirror no longer has the file, set DSOPS_DEBIAN_MIRROR"):
        DebianMirror(mirror, tmp_path / "cache", FakeRunner()).fetch(package())


def test_an_unreachable_mirror_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"set DSOPS_DEBIAN_MIRROR"):
        DebianMirror("http://127.0.0.1:9", tmp_path / "cache", FakeRunner()).fetch(package())


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (
            "'http://127.0.0.1:9/security/dists/a/InRelease' a 0\n'http://127.0.0.1:9/debian/dists/a/InRelease' a 0\n",
            True,
        ),
        ("'http://127.0.0.1:9/other/dists/a/InRelease' a 0\n", False),
    ],
    ids=["debian", "foreign"],
)
def test_the_mirror_is_the_one_of_apt(printed: str, found: bool, tmp_path: Path) -> None:
    source = DebianMirror(None, tmp_path / "cache", FakeRunner({"--print-uris": printed}))
    with pytest.raises(FetchError) as error:
        source.fetch(package())
    assert (f"http://127.0.0.1:9/debian/{POOL}" in str(error.value)) is found
    assert "set DSOPS_DEBIAN_MIRROR" in str(error.value)


def test_a_machine_without_apt_is_told_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="no Debian mirror: set DSOPS_DEBIAN_MIRROR, or run on Debian"):
        DebianMirror(None, tmp_path / "cache", FakeRunner()).fetch(package())


def test_an_sdist_of_another_hash_is_refused_and_removed(tmp_path: Path) -> None:
    runner = FakeRunner(file="deepspeed-0.19.8.tar.gz", content=b"not it")
    with pytest.raises(FetchError, match=r"accepts 0{64}; the file was removed"):
        fetch_sdist("0.19.8", "0" * 64, tmp_path, runner)
    assert list(tmp_path.rglob("*.tar.gz")) == []


def test_an_index_that_fails_is_named_with_pips_own_words(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"deepspeed 0.19.8 cannot be downloaded; check the network(.|\n)*not here"):
        fetch_sdist("0.19.8", "0" * 64, tmp_path, FakeRunner())


WHEEL = "torch-2.7.1-cp311-cp311-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    ("index", "accepted", "refused"),
    [
        (None, ("0" * 64,), True),
        (None, (hashlib.sha256(b"torch").hexdigest(),), False),
        (None, (), False),
        ("https://index.example", ("0" * 64,), False),
    ],
    ids=["wrong", "right", "not pinned", "label index"],
)
def test_torch_of_the_default_index_must_have_a_pinned_hash(
    index: str | None, accepted: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    runner = FakeRunner({"-c": "3.11\n"}, file=WHEEL, content=b"torch")
    origin = TorchOrigin(requirement="torch==2.7.1", index=index, note="")
    if refused:
        with pytest.raises(FetchError, match=r"build_matrix.yaml accepts 0{64}"):
            fetch_torch(origin, Path("python3.11"), accepted, tmp_path, runner)
    else:
        assert fetch_torch(origin, Path("python3.11"), accepted, tmp_path, runner).path.name == WHEEL
    assert ("--index-url" in runner.commands[-1]) is (index is not None)


def interrupted(path: Path) -> None:
    with fresh_folder(path) as scratch:
        (scratch / "half").touch()
        raise KeyboardInterrupt


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "home")
    assert list(tmp_path.iterdir()) == []
    with fresh_folder(tmp_path / "home") as scratch:
        (scratch / "whole").touch()
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["whole"]


def test_of_two_processes_that_make_one_folder_the_first_wins(tmp_path: Path) -> None:
    with fresh_folder(tmp_path / "home") as slow:
        (slow / "slow").touch()
        with fresh_folder(tmp_path / "home") as quick:
            (quick / "quick").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "quick"]
