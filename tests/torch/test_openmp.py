"""One OpenMP runtime in the process, torch's, whichever that is: each case in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.building import compiler
from tests.torch.opening import run_script

# Before and after stand around the opening and the calls, so that what torch or scikit-learn map themselves is in both.
OBSERVE = """
import json, os, sys
from pathlib import Path

FIRST = {first!r}
if FIRST:
    __import__(FIRST)
import torch
from tests.torch.opening import open_portable

torch.set_num_threads({threads}) if {threads} else None

def runtimes():
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {{line.split()[-1] for line in lines if "/" in line}}
    words = ("libgomp", "libomp", "libiomp", "preloaded")
    return sorted(name for name in files if any(word in os.path.basename(name) for word in words))

def running():
    return len(os.listdir("/proc/self/task"))

before, started = runtimes(), running()
module = open_portable(Path(sys.argv[1]))
module.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
tensors = [torch.ones(100_000) for _ in range(4)]
module.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *tensors)
grown = running() - started
torch.ones(1_000_000).exp_()
more = running() - started - grown
print(json.dumps(dict(before=before, after=runtimes(), openmp=module.openmp, grown=grown, more=more, told=torch.get_num_threads())))
"""


def observed(path: Path, *, first: str = "", threads: int = 0, **variables: str) -> dict[str, Any]:
    done = run_script(OBSERVE.format(first=first, threads=threads), str(path), variables=variables)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["after"] == result["before"]
    assert result["more"] == 0  # torch's own parallel loops run on the threads that are there
    return result


def of_torch() -> Path:
    (runtime,) = (Path(torch.__file__).parent / "lib").glob("lib[gio]*omp*.so*")
    return runtime


def test_it_is_the_one_that_torch_brought(cpu_adam_path: Path) -> None:
    seen = observed(cpu_adam_path, threads=3)
    assert seen["before"] == [str(of_torch())]
    assert seen["openmp"] == str(of_torch())
    assert seen["grown"] == 2


def test_it_is_not_the_one_that_scikit_learn_loaded_first(cpu_adam_path: Path) -> None:
    seen = observed(cpu_adam_path, first="sklearn.cluster", threads=3)
    assert len(seen["before"]) == 2
    assert seen["openmp"] == str(of_torch())
    assert seen["grown"] == 2


@pytest.mark.parametrize("kind", ["torch's", "scikit-learn's"])
def test_it_is_the_preloaded_one_as_it_is_for_torch(cpu_adam_path: Path, tmp_path: Path, kind: str) -> None:
    # torch's has the name that libtorch_cpu.so needs, so it is the only one; the other is there beside torch's.
    files = importlib.metadata.files("scikit-learn") or []
    (other,) = (file for file in files if "libgomp" in file.name)
    preloaded = tmp_path / "preloaded.so"
    shutil.copyfile(of_torch() if kind == "torch's" else other.locate(), preloaded)
    seen = observed(cpu_adam_path, threads=3, LD_PRELOAD=str(preloaded))
    expected = [str(preloaded)] if kind == "torch's" else [str(preloaded), str(of_torch())]
    assert sorted(seen["before"]) == sorted(expected)
    assert seen["openmp"] == str(preloaded)
    assert seen["grown"] == 2


@pytest.mark.parametrize(
    ("threads", "variables", "told"),
    [(0, {"OMP_NUM_THREADS": "2"}, 2), (0, {"OMP_NUM_THREADS": "1"}, 1), (4, {"OMP_NUM_THREADS": "2"}, 4), (1, {}, 1)],
    ids=["two of the environment", "one of the environment", "four of torch", "one of torch"],
)
def test_threads_are_as_many_as_torch_was_told(
    cpu_adam_path: Path, threads: int, variables: dict[str, str], told: int
) -> None:
    seen = observed(cpu_adam_path, threads=threads, **variables)
    assert (seen["told"], seen["grown"]) == (
        told,
        told - 1,
    )  # torch takes no more from the environment than there are cores


FIRST_STEP = 1 - 1e-3 * (1 / 0.1) / (1 / 0.001) ** 0.5
# Without torch: the library's own interface, memory from the standard library, and a count of what OpenMP is asked for.
WITHOUT_TORCH = """
import ctypes, json, os, struct, sys
from array import array
from pathlib import Path

loaded = [ctypes.CDLL(name) for name in sys.argv[2:]]
from dsops_prebuilt.portable._arguments import Signature
from dsops_prebuilt.portable._library import FAILED, Library
from dsops_prebuilt.portable._openmp import bind_openmp

library = Library(sys.argv[1])
entries = {entry.name: entry for entry in library.entries}

def call(name, *values):
    entry = entries[name]
    layout = Signature.parse(name, entry.signature).layout
    return library.caller(entry)(struct.pack(layout, entry.handle, *values))

def update(count=64_000):
    memory = [array("f", [1.0]) * count for _ in range(4)]
    slots = [slot for part in memory for slot in (part.buffer_info()[0], count | 6 << 56)]
    call("adam_update", 0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, *slots)
    return memory[0][0], memory[0][-1]

call("create_adam", 0, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 0)
"""


def without_torch(script: str, path: Path, *libraries: Path, **variables: str) -> Any:
    done = run_script(WITHOUT_TORCH + script, str(path), *map(str, libraries), variables=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_works_on_one_thread_where_there_is_no_torch(cpu_adam_path: Path) -> None:
    script = """
openmp, started = bind_openmp(library), len(os.listdir("/proc/self/task"))
print(json.dumps([openmp, update(), len(os.listdir("/proc/self/task")) - started]))
"""
    openmp, (first, last), grown = without_torch(script, cpu_adam_path)
    assert (openmp, grown) == (None, 0)
    assert first == last == pytest.approx(FIRST_STEP)


def test_a_region_is_handed_to_the_runtime_that_is_bound(cpu_adam_path: Path) -> None:
    script = """
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
asked, of = [], [0, 1]

@ctypes.CFUNCTYPE(None, BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def parallel(body, data, threads, flags):
    asked.append(threads)
    of[1] = 4
    for of[0] in range(4):
        body(data)

count = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: of[1])
number = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: of[0])
library.bind_openmp((parallel, count, number))
print(json.dumps([asked, update(), asked]))
"""
    _, (first, last), asked = without_torch(script, cpu_adam_path)
    assert asked == [0]  # as many as the runtime sees fit
    assert first == last == pytest.approx(FIRST_STEP)


@pytest.mark.parametrize("used", [False, True], ids=["not used yet", "used"])
@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_it_may_be_another_vendors(cpu_adam_path: Path, tmp_path: Path, binding: str, used: bool) -> None:
    files = importlib.metadata.files("intel-openmp") or []
    (runtime,) = (Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so")
    source, torch_like = tmp_path / "loop.c", tmp_path / "libtorch_cpu.so"
    source.write_text("""
#include <omp.h>
int most(void) { return omp_get_max_threads(); }
int loop(void) {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 1000; ++i) sum += i;
    return sum;
}
""")
    gcc = str(compiler().gcc)
    subprocess.run([gcc, "-fPIC", "-fopenmp", "-c", str(source), "-o", f"{source}.o"], check=True)
    link = [gcc, "-shared", f"{source}.o", f"-Wl,-z,{binding}", *compiler().link_flags, "-o", str(torch_like)]
    subprocess.run([*link, str(runtime), f"-Wl,-rpath,{runtime.parent}"], check=True)
    script = f"""
assert not {used} or loaded[0].loop() == 499500
openmp, started = bind_openmp(library), len(os.listdir("/proc/self/task"))
update()
maps = Path("/proc/self/maps").read_text()
print(json.dumps([openmp, len(os.listdir("/proc/self/task")) - started, "libgomp" in maps]))
"""
    openmp, grown, second = without_torch(script, cpu_adam_path, torch_like, OMP_NUM_THREADS="3")
    assert openmp == str(runtime)
    assert grown == (0 if used else 2)
    assert not second


def test_one_that_is_out_of_reach_is_none(cpu_adam_path: Path, tmp_path: Path) -> None:
    """As where the runtime was linked into torch, and its functions were hidden."""
    source, torch_like = tmp_path / "none.c", tmp_path / "libtorch_cpu.so"
    source.write_text("int omp_get_max_threads(void) { return 7; }\nint ask(void) { return omp_get_max_threads(); }\n")
    link = [str(compiler().gcc), *compiler().link_flags, "-fPIC", "-shared", str(source), "-o", str(torch_like)]
    subprocess.run(link, check=True)
    script = "print(json.dumps([bind_openmp(library), update()[0]]))"
    openmp, first = without_torch(script, cpu_adam_path, torch_like)
    assert openmp is None
    assert first == pytest.approx(FIRST_STEP)
