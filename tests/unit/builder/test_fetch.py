"""Downloads: what is pinned is checked, and nothing wrong stays in the cache."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsops_builder.cache import fresh_folder
from dsops_builder.errors import CommandError, FetchError
from dsops_builder.fetch import DebianMirror, Sdists, fetch_torch
from dsops_builder.model import Package, SourceTree, TorchOrigin

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


class PlainHandler(QuietHandler):
    """Calls everything plain text."""

    def guess_type(self, path: object) -> str:
        """See SimpleHTTPRequestHandler."""
        del path
        return "text/plain"


@contextmanager
def serve(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """A server of the folder on the loopback address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def mirror(mirror_folder: Path) -> Iterator[str]:
    with serve(mirror_folder) as address:
        yield address


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


def sdist(version: str, *, license_file: bool = True) -> bytes:
    """The bytes of a small sdist of DeepSpeed."""
    texts = {"csrc/adam/cpu_adam.cpp": "int x;\n", "LICENSE": f"the licence of {version}\n"}
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, text in texts.items():
            if name != "LICENSE" or license_file:
                entry = tarfile.TarInfo(f"deepspeed-{version}/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    return written.getvalue()


RELEASES = {"0.19.7": sdist("0.19.7", license_file=False), "0.19.8": sdist("0.19.8")}
TREES = {version: SourceTree(sdist_sha256=hashlib.sha256(content).hexdigest()) for version, content in RELEASES.items()}


@pytest.fixture
def index_folder(tmp_path: Path) -> Path:
    """An index by PEP 503: a page of links, a wheel and an egg of the same release among them."""
    page, files = tmp_path / "index/simple/deepspeed/index.html", tmp_path / "index/files"
    page.parent.mkdir(parents=True)
    files.mkdir()
    for version, content in RELEASES.items():
        (files / f"deepspeed-{version}.tar.gz").write_bytes(content)
    names = (
        *(f"deepspeed-{version}.tar.gz" for version in RELEASES),
        "deepspeed-0.19.8-py3-none-any.whl",
        "deepspeed-0.19.8-py3.11.egg",
        "deepspeed.html",
    )
    page.write_text("".join(f'<a href="../../files/{name}">{name}</a>\n' for name in names), encoding="utf-8")
    return tmp_path / "index"


@pytest.fixture
def index(index_folder: Path) -> Iterator[str]:
    with serve(index_folder) as address:
        yield f"{address}/simple"


def configured(address: str) -> FakeRunner:
    """A pip that is configured for an index."""
    return FakeRunner({"config": f"global.index-url='{address}'\n"})


def test_an_sdist_comes_from_the_index_of_pip_once(index: str, index_folder: Path, tmp_path: Path) -> None:
    runner = configured(index)
    sdists = Sdists(TREES, tmp_path / "cache", runner)
    path = sdists.fetch("0.19.8")
    assert path == tmp_path / "cache/sdist/deepspeed-0.19.8.tar.gz"
    assert path.read_bytes() == RELEASES["0.19.8"]
    assert sdists.fetch("0.19.7").read_bytes() == RELEASES["0.19.7"]
    # What is in the cache is not asked for again.
    (index_folder / "files/deepspeed-0.19.8.tar.gz").unlink()
    assert sdists.fetch("0.19.8") == path
    assert [command[-2:] for command in runner.commands] == [["config", "list"]]
    assert sorted(item.name for item in path.parent.iterdir()) == ["deepspeed-0.19.7.tar.gz", "deepspeed-0.19.8.tar.gz"]


@pytest.mark.parametrize(
    ("printed", "asked"),
    [
        (":env:.index-url='{good}'\nglobal.index-url='{bad}'\n", "good"),
        ("global.index-url='{bad}'\n:env:.index-url='{good}'\n", "good"),
        ("global.extra-index-url='{good}'\nglobal.index-url='{bad}'\ninstall.index-url='{good}'\n", "bad"),
    ],
    ids=["environment first", "environment last", "files"],
)
def test_the_index_is_the_one_of_pips_environment_or_else_of_its_files(
    printed: str, asked: str, index: str, tmp_path: Path
) -> None:
    bad = "http://127.0.0.1:9/simple"
    sdists = Sdists(TREES, tmp_path, FakeRunner({"config": printed.format(good=index, bad=bad)}))
    if asked == "good":
        assert sdists.fetch("0.19.8").exists()
    else:
        with pytest.raises(
            FetchError, match=r"^DeepSpeed 0\.19\.8 cannot be downloaded from http://127\.0\.0\.1:9/simple: "
        ):
            sdists.fetch("0.19.8")


def test_a_release_that_the_index_does_not_have(index: str, tmp_path: Path) -> None:
    trees = {**TREES, "0.19.9": SourceTree(sdist_sha256="0" * 64)}
    with pytest.raises(FetchError) as error:
        Sdists(trees, tmp_path / "cache", configured(index)).fetch("0.19.9")
    assert str(error.value) == f"{index} has no sdist of DeepSpeed 0.19.9"
    assert list((tmp_path / "cache").rglob("*.tar.gz")) == []


def test_a_release_of_which_the_index_has_a_wheel_only(index: str, index_folder: Path, tmp_path: Path) -> None:
    page = index_folder / "simple/deepspeed/index.html"
    page.write_text(page.read_text().replace("deepspeed-0.19.8.tar.gz", "deepspeed-0.19.8-cp311-cp311-any.whl"))
    with pytest.raises(FetchError, match=r" has no sdist of DeepSpeed 0\.19\.8$"):
        Sdists(TREES, tmp_path / "cache", configured(index)).fetch("0.19.8")


def test_an_sdist_of_another_hash_is_refused_and_removed(index: str, index_folder: Path, tmp_path: Path) -> None:
    (index_folder / "files/deepspeed-0.19.8.tar.gz").write_bytes(b"not it")
    path = tmp_path / "cache/sdist/deepspeed-0.19.8.tar.gz"
    found, accepted = hashlib.sha256(b"not it").hexdigest(), TREES["0.19.8"].sdist_sha256
    with pytest.raises(FetchError) as error:
        Sdists(TREES, tmp_path / "cache", configured(index)).fetch("0.19.8")
    assert str(error.value) == (
        f"{path}: sha256 {found}, and build_matrix.yaml accepts {accepted}; the file was removed"
    )
    assert list(path.parent.iterdir()) == []


def test_an_sdist_that_was_damaged_in_the_cache_is_refused_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "sdist/deepspeed-0.19.8.tar.gz"
    path.parent.mkdir()
    path.write_bytes(RELEASES["0.19.8"][:-1])
    with pytest.raises(FetchError, match=r"; the file was removed$"):
        Sdists(TREES, tmp_path, FakeRunner()).fetch("0.19.8")
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [("files/deepspeed-0.19.8.tar.gz", "404 Client Error"), ("simple/deepspeed/index.html", "")],
    ids=["file", "page"],
)
def test_an_index_that_lacks_what_it_should_have(
    index: str, index_folder: Path, tmp_path: Path, broken: str, words: str
) -> None:
    (index_folder / broken).unlink()
    if not words:
        (index_folder / broken).parent.rmdir()
        words = "No details about project 'deepspeed' available"
    with pytest.raises(FetchError) as error:
        Sdists(TREES, tmp_path / "cache", configured(index)).fetch("0.19.8")
    assert str(error.value).startswith(f"DeepSpeed 0.19.8 cannot be downloaded from {index}: {words}")
    assert str(error.value).endswith("\nCheck the network and pip's index-url")
    assert list((tmp_path / "cache/sdist").iterdir()) == []


def test_a_server_that_is_no_index(index_folder: Path, tmp_path: Path) -> None:
    with serve(index_folder, PlainHandler) as address, pytest.raises(FetchError) as error:
        Sdists(TREES, tmp_path / "cache", configured(f"{address}/simple")).fetch("0.19.8")
    assert str(error.value).startswith(f"DeepSpeed 0.19.8 cannot be downloaded from {address}/simple: ")
    assert "'text/plain'" in str(error.value)


@pytest.mark.parametrize("address", ["file:///opt/simple", "nowhere"])
def test_an_address_that_is_not_of_http(address: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError) as error:
        Sdists(TREES, tmp_path, configured(address)).fetch("0.19.8")
    assert str(error.value).startswith(f"DeepSpeed 0.19.8 cannot be downloaded from {address}: ")


def test_an_index_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    runner = configured("http://127.0.0.1:9/simple")
    with pytest.raises(FetchError) as error:
        Sdists(TREES, tmp_path, runner).fetch("0.19.8")
    message = str(error.value)
    assert message.startswith("DeepSpeed 0.19.8 cannot be downloaded from http://127.0.0.1:9/simple: ")
    assert message.endswith("\nCheck the network and pip's index-url")


def test_what_is_in_the_cache_needs_neither_an_index_nor_pip(tmp_path: Path) -> None:
    path = tmp_path / "sdist/deepspeed-0.19.8.tar.gz"
    path.parent.mkdir()
    path.write_bytes(RELEASES["0.19.8"])
    runner = FakeRunner()
    assert Sdists(TREES, tmp_path, runner).fetch("0.19.8") == path
    assert runner.commands == []


def test_an_sdist_is_unpacked_and_its_licence_read(index: str, tmp_path: Path) -> None:
    sdists = Sdists(TREES, tmp_path / "cache", configured(index))
    tree = sdists.unpack("0.19.8", tmp_path / "trees")
    assert tree == tmp_path / "trees/deepspeed-0.19.8"
    assert (tree / "csrc/adam/cpu_adam.cpp").read_text() == "int x;\n"
    assert sdists.license_text("0.19.8") == "the licence of 0.19.8\n"
    with pytest.raises(FetchError, match=r"^the sdist of DeepSpeed 0\.19\.7 has no LICENSE$"):
        sdists.license_text("0.19.7")


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


def test_a_torch_that_cannot_be_downloaded_is_named_with_pips_own_words(tmp_path: Path) -> None:
    origin = TorchOrigin(requirement="torch==2.7.1", index=None, note="")
    with pytest.raises(FetchError) as error:
        fetch_torch(origin, Path("python3.11"), (), tmp_path, FakeRunner({"-c": "3.11\n"}))
    first, second = str(error.value).splitlines()
    assert first == "torch==2.7.1 cannot be downloaded; check the network and pip's index"
    assert second.endswith(": not here")


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
