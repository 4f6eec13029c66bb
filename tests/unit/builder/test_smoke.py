"""What the smoke sessions watch for: each broken promise gives its sentence."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.errors import SmokeError
from dsops_builder.smoke.environment import find_core, find_wheels
from dsops_builder.smoke.judge import judge_run
from dsops_builder.smoke.trace import compilers, executed

PAYLOAD = Path("/env/site-packages/dsops_prebuilt_payloads/cpu")
GOOD: dict[str, Any] = {
    "op_file": str(PAYLOAD / "cpu_adam_op.so"),
    "loaded": {"cpu_adam": str(PAYLOAD / "cpu_adam_op.so")},
    "optimizer": "DeepSpeedCPUAdam",
    "difference": 3e-7,
    "losses": [1.5, 1.4],
    "jit_calls": [],
    "openmp": ["/env/site-packages/torch.libs/libgomp-24e2ab19.so.1.0.0"],
    "programs": ("/env/bin/python",),
}
LOG = """\
2001 execve("/env/bin/python", ["/env/bin/python", "-c", "pass"], 0x7ffc /* 9 vars */) = 0
2002 execve("/nothing/ninja", ["ninja", "--version"], 0x7ffc /* 9 vars */ <unfinished ...>
2002 <... execve resumed>)             = -1 ENOENT (No such file or directory)
2003 execveat(AT_FDCWD, "/usr/bin/x86_64-linux-gnu-gcc-12", ["gcc"], NULL, 0) = 0
2001 +++ exited with 0 +++
"""


def test_every_program_in_the_log_is_seen_failed_attempts_too() -> None:
    assert list(executed(LOG)) == ["/env/bin/python", "/nothing/ninja", "/usr/bin/x86_64-linux-gnu-gcc-12"]


@pytest.mark.parametrize(
    "name",
    [
        "gcc",
        "g++-10",
        "cc",
        "c++",
        "x86_64-linux-gnu-g++",
        "clang++-15",
        "cc1plus",
        "ninja",
        "nvcc",
        "ld",
        "ld.bfd",
        "as",
    ],
)
def test_a_compiler_is_recognised_by_its_name(name: str) -> None:
    assert compilers([f"/opt/tools/{name}"]) == (f"/opt/tools/{name}",)


@pytest.mark.parametrize("name", ["python3.11", "uname", "cat", "ldconfig", "lscpu", "bash", "file", "accelerate"])
def test_other_programs_are_not_compilers(name: str) -> None:
    assert compilers([f"/usr/bin/{name}"]) == ()


def test_a_run_as_promised_has_no_complaint() -> None:
    assert list(judge_run(GOOD, PAYLOAD)) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"op_file": "/root/.cache/torch_extensions/cpu_adam.so"}, "cpu_adam was loaded from /root/.cache"),
        ({"loaded": {"shm": "/root/shm.so"}}, "loaded from outside the payload: {'shm': '/root/shm.so'}"),
        ({"optimizer": "AdamW"}, "the optimizer was AdamW"),
        ({"difference": 4e-3}, "weights differ from torch.optim.AdamW by 0.004"),
        ({"difference": float("nan")}, "weights differ from torch.optim.AdamW by nan"),
        ({"losses": [1.5, 1.5]}, "nothing was trained"),
        ({"jit_calls": ["cpu_adam"]}, "asked to compile cpu_adam"),
        ({"openmp": []}, "not one OpenMP runtime in the process, but []"),
        (
            {"openmp": ["/env/libgomp-24e2ab19.so.1.0.0", "/usr/lib/libgomp.so.1"]},
            "not one OpenMP runtime in the process, but ['/env/libgomp-24e2ab19.so.1.0.0', '/usr/lib/libgomp.so.1']",
        ),
        ({"programs": ()}, "the watch itself failed"),
        ({"programs": ("/usr/bin/python", "/usr/bin/g++")}, "a compiler was started or looked for: /usr/bin/g++"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_promise_is_said(change: dict[str, Any], sentence: str) -> None:
    (complaint,) = judge_run({**GOOD, **change}, PAYLOAD)
    assert sentence in complaint


def test_wheels_are_found_by_name_version_and_python(tmp_path: Path) -> None:
    names = (
        "dsops_prebuilt-0.1.0-py3-none-any.whl",
        "dsops_prebuilt_cpu-0.1.0-1-cp311-cp311-manylinux_2_24_x86_64.whl",
        "dsops_prebuilt_cpu-0.1.0-1-cp312-cp312-manylinux_2_24_x86_64.whl",
        "dsops_prebuilt_cpu-0.1.0-0-cp311-cp311-manylinux_2_24_x86_64.whl",
        "dsops_prebuilt_cpu-0.0.9-1-cp311-cp311-manylinux_2_24_x86_64.whl",
    )
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in find_wheels(tmp_path, "cpu", "3.11")] == list(names[:2])


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ("dsops_prebuilt-0.1.0-py3-none-any.whl", "no wheel of dsops-prebuilt-cpu for Python 3.11 0.1.0"),
        ("dsops_prebuilt_cpu-0.1.0-1-cp311-cp311-manylinux_2_24_x86_64.whl", "no wheel of the loader 0.1.0"),
    ],
)
def test_a_wheel_that_is_not_there_is_named(tmp_path: Path, present: str, missing: str) -> None:
    (tmp_path / present).touch()
    with pytest.raises(SmokeError, match=missing):
        find_wheels(tmp_path, "cpu", "3.11")


def test_the_core_wheel_of_this_machine_is_taken_before_the_loader_alone(tmp_path: Path) -> None:
    machine = platform.machine()
    other = "aarch64" if machine == "x86_64" else "x86_64"
    names = (
        "dsops_prebuilt-0.1.0-py3-none-any.whl",
        f"dsops_prebuilt-0.1.0-py3-none-manylinux_2_24_{other}.whl",
        f"dsops_prebuilt-0.0.9-py3-none-manylinux_2_24_{machine}.whl",
        f"dsops_prebuilt-0.1.0-py3-none-manylinux_2_24_{machine}.whl",
    )
    for name in names[:-1]:
        (tmp_path / name).touch()
    assert find_core(tmp_path).name == names[0]
    (tmp_path / names[-1]).touch()
    assert find_core(tmp_path).name == names[-1]


def test_a_core_wheel_of_another_machine_is_none(tmp_path: Path) -> None:
    (tmp_path / "dsops_prebuilt-0.1.0-py3-none-manylinux_2_24_riscv64.whl").touch()
    with pytest.raises(SmokeError) as caught:
        find_core(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no wheel of the loader 0.1.0; nox -s core makes it"
