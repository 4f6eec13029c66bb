from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from python_discovery import PythonInfo

from dsops_builder.facts import find_interpreter, gather_facts, index_answers
from dsops_builder.matrix import load_matrix

SMALL = Path(__file__).parents[2] / "data/small"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


class Index(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/whl/cu118/" else 403)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Index) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_index_answers(server: str) -> None:
    assert index_answers(f"{server}/whl/cu118")
    assert not index_answers(f"{server}/whl/cu999")


def test_index_out_of_reach_is_a_no() -> None:
    assert not index_answers("http://127.0.0.1:9/whl/cu118")
    assert not index_answers("http://name.invalid/whl/cu118")


def pyenv(root: Path, release: str) -> Path:
    binary = root / "versions" / release / "bin"
    binary.mkdir(parents=True)
    target = binary / f"python{RUNNING}"
    target.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    target.chmod(0o755)
    return target


def test_newest_patch_of_pyenv_comes_first(tmp_path: Path) -> None:
    pyenv(tmp_path, f"{RUNNING}.9")
    newest = pyenv(tmp_path, f"{RUNNING}.10")
    pyenv(tmp_path, f"{RUNNING}-dev")

    assert find_interpreter(RUNNING, {"PYENV_ROOT": str(tmp_path), "PATH": ""}) == newest
    assert find_interpreter(RUNNING, {"HOME": str(tmp_path), "PATH": ""}) != newest


def test_pyenv_is_found_below_home_when_it_has_no_variable(tmp_path: Path) -> None:
    target = pyenv(tmp_path / ".pyenv", f"{RUNNING}.1")

    assert find_interpreter(RUNNING, {"HOME": str(tmp_path), "PATH": ""}) == target


def test_broken_interpreter_is_passed_over(tmp_path: Path) -> None:
    good = pyenv(tmp_path, f"{RUNNING}.1")
    broken = pyenv(tmp_path, f"{RUNNING}.2")
    broken.write_text("#!/bin/sh\nexit 1\n")

    assert find_interpreter(RUNNING, {"PYENV_ROOT": str(tmp_path), "PATH": ""}) == good


def test_facts_are_of_the_rows_asked_for(tmp_path: Path) -> None:
    matrix = load_matrix(SMALL / "build_matrix.yaml")
    asked: list[str] = []

    def answers(url: str) -> bool:
        asked.append(url)
        return True

    binary = pyenv(tmp_path, f"{RUNNING}.1")
    env = {"PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path), "PATH": ""}
    facts = gather_facts(matrix, ["1_cpu"], env, answers=answers)

    assert asked == ["https://download.pytorch.org/whl/cpu"]
    assert facts.indexes == {"cpu": True}
    assert list(facts.interpreters) == ["3.11"]
    assert facts.interpreters["3.11"] == (binary if RUNNING == "3.11" else find_interpreter("3.11", env))


@pytest.mark.parametrize(
    ("attribute", "value"), [("free_threaded", True), ("implementation", "PyPy")], ids=["free-threaded", "PyPy"]
)
def test_interpreters_that_are_not_covered_are_not_taken(
    attribute: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyenv(tmp_path, f"{RUNNING}.1")
    env = {"PYENV_ROOT": str(tmp_path), "PATH": ""}
    other = PythonInfo.current()
    monkeypatch.setattr(other, attribute, value)
    monkeypatch.setattr(PythonInfo, "from_exe", lambda *_, **__: other)

    found = find_interpreter(RUNNING, env)
    assert found is None or tmp_path not in found.parents


def test_no_interpreter_of_that_release(tmp_path: Path) -> None:
    assert find_interpreter("3.99", {"HOME": str(tmp_path), "PATH": "/usr/bin"}) is None
