"""Ask the machine what a plan needs to know: which interpreters are here, and which indexes answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from python_discovery import PythonInfo, get_interpreter

from dsops_builder.model import Matrix, split_row_id
from dsops_builder.plan import LABEL_INDEX, Facts

_ANSWER_SECONDS = 3.0


def gather_facts(
    matrix: Matrix, rows: Iterable[str], env: Mapping[str, str], *, answers: Callable[[str], bool] | None = None
) -> Facts:
    """Return the facts for these rows of the matrix. ``answers`` stands in for :func:`index_answers`.

    ``env`` is the process's environment: ``PYENV_ROOT``, ``HOME`` and ``PATH`` say where interpreters may be. Takes a
    few seconds where an index is out of reach; raises nothing for anything that is not there.
    """
    rows = tuple(rows)
    pythons = dict.fromkeys(
        python for row in rows for pairing in matrix.rows[row].pairings for python in pairing.pythons
    )
    labels = tuple(dict.fromkeys(split_row_id(row)[1] for row in rows))
    with ThreadPoolExecutor(max_workers=max(1, len(labels))) as pool:
        answered = pool.map(answers or index_answers, (LABEL_INDEX.format(label=label) for label in labels))
        interpreters = {python: find_interpreter(python, env) for python in pythons}
        return Facts(indexes=dict(zip(labels, answered, strict=True)), interpreters=interpreters)


def index_answers(url: str) -> bool:
    """Whether an HTTP HEAD of ``url`` succeeds within a few seconds; an error of any kind is a no."""
    try:
        return requests.head(f"{url}/", timeout=_ANSWER_SECONDS, allow_redirects=True).ok
    except requests.RequestException:
        return False


def find_interpreter(python: str, env: Mapping[str, str]) -> Path | None:
    """Return a CPython of the release line ``python`` (``"3.11"``), with the GIL, or None.

    pyenv's come first, the newest patch release before older ones, as they bring their headers; then ``/usr/bin``;
    then what virtualenv's discovery finds (PATH, uv's and other managers' folders).
    """
    root = Path(env.get("PYENV_ROOT") or Path(env.get("HOME", "/")) / ".pyenv")
    installed = sorted((root / "versions").glob(f"{python}.*"), key=_patch, reverse=True)
    candidates = [folder / "bin" / f"python{python}" for folder in installed]
    for candidate in (*candidates, Path("/usr/bin") / f"python{python}"):
        if candidate.exists():
            # A broken or foreign file under that name answers None, and the search goes on.
            info = PythonInfo.from_exe(str(candidate), raise_on_error=False, env=env)
            if info is not None and _fits(info, python):
                return candidate
    found = get_interpreter(f"cpython{python}", env=env, predicate=lambda info: _fits(info, python))
    return None if found is None else Path(found.system_executable or found.executable)


def _patch(folder: Path) -> int:
    """``17`` of ``.../3.11.17``; names such as ``3.11-dev`` or ``3.13.1t`` come last."""
    patch = folder.name.rpartition(".")[2]
    return int(patch) if patch.isdigit() else -1


def _fits(info: PythonInfo, python: str) -> bool:
    release = f"{info.version_info.major}.{info.version_info.minor}"
    return info.implementation == "CPython" and release == python and not info.free_threaded
