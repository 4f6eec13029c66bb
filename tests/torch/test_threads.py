"""Many threads, and processes that forked: what the stock module does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.torch.calls import NUMBERS, OPTIMIZER, block, outcome, tensors, update
from tests.torch.opening import run_script


def test_threads_update_their_own_tensors(adam: ModuleType) -> None:
    def work(number: int) -> torch.Tensor:
        adam.create_adam(number, *OPTIMIZER)
        made = tensors(1000 + number)
        for step in range(1, 50):
            adam.adam_update(number, step, *NUMBERS[2:], *made)
        adam.destroy_adam(number)
        return made[0]

    alone = [work(number) for number in range(100, 108)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(100, 108)))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_an_optimizer_that_another_thread_destroys_is_there_or_is_refused(adam: ModuleType) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            adam.create_adam(5, *OPTIMIZER)
            adam.destroy_adam(5)

    thread = threading.Thread(target=churn)
    thread.start()
    seen = {outcome(lambda module: update(module, at=0, value=5), adam) for _ in range(2000)}
    stop.set()
    thread.join()
    assert seen <= {0, ValueError}


def test_a_failure_is_told_to_the_thread_that_it_belongs_to(adam: ModuleType) -> None:
    def work(number: int) -> set[str]:
        texts = set()
        for _ in range(300):
            with pytest.raises(ValueError, match="no optimizer") as caught:
                update(adam, at=0, value=number)
            texts.add(str(caught.value))
        return texts

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(50, 54)))
    message = "adam_update: there is no optimizer {}; it was not created, or it was destroyed"
    assert found == [{message.format(number)} for number in range(50, 54)]


def test_other_threads_run_while_one_waits_for_the_worker(adam: ModuleType) -> None:
    memory = block(adam)
    adam.zenflow_adam_ctrl_init(memory.data_ptr(), 1)
    beats: list[float] = []

    def beat() -> None:
        while not beats or beats[-1] < begun + 0.2:
            beats.append(time.monotonic())
            time.sleep(0.01)

    begun = time.monotonic()
    thread = threading.Thread(target=beat)
    thread.start()
    assert adam.zenflow_adam_wait(memory.data_ptr(), 0.3) is False
    ended = time.monotonic()
    thread.join()
    assert sum(begun <= moment <= ended for moment in beats) > 5


FORK = """
import os, sys, time
from pathlib import Path
import torch
from tests.torch.opening import open_any

module, before = open_any(Path(sys.argv[1])), sys.argv[2] == "before"
torch.set_num_threads(int(sys.argv[3]))
module.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)

def update():
    made = [torch.ones(64_000) for _ in range(4)]
    module.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *made)

if not before:
    update()
child = os.fork()
if child == 0:
    update()
    os._exit(7)
for _ in range(60):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        print(os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.05)
else:
    print("hangs")
    os.kill(child, 9)
"""


@pytest.mark.parametrize(
    ("when", "threads", "expected"),
    [("before", "1", "7"), ("before", "2", "7"), ("after", "1", "7"), ("after", "2", "hangs")],
    ids=["before, one", "before, two", "after, one", "after, two"],
)
def test_a_child_that_forked_is_as_libgomp_has_it(cpu_adam_path: Path, when: str, threads: str, expected: str) -> None:
    """libgomp's threads are not in the child, and it waits for them: the stock module hangs there too, and torch."""
    done = run_script(FORK, str(cpu_adam_path), when, threads)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
