"""No argument of any function ends the process: see fuzz.py."""

from __future__ import annotations

from tests.torch.building import Libraries
from tests.torch.opening import run_script

EXAMPLES = 80


def test_bad_arguments_are_refused_and_never_a_crash(libraries: Libraries, level: str) -> None:
    paths = [str(path) for (_, at), path in libraries.items() if at == level]
    script = "import sys; from tests.torch.fuzz import main; main(*sys.argv[1:])"
    done = run_script(script, str(EXAMPLES), *paths, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.splitlines()[-1] == "21 functions"
