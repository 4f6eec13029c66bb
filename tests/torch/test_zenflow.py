"""ZenFlow end to end: a spawned worker, two gradient buffers, the shared control block."""

from __future__ import annotations

import json

from tests.torch.building import Libraries
from tests.torch.opening import run_script


def test_a_worker_makes_what_plain_steps_make(libraries: Libraries, level: str) -> None:
    script = "import sys; from tests.torch.zenflow import main; main(sys.argv[1])"
    done = run_script(script, str(libraries["cpu_adam", level]))
    assert done.returncode == 0, done.stderr
    overlapped, plain = json.loads(done.stdout)
    assert overlapped == plain
