"""Compiler, toolkit and environment are what the matrix says, or are refused with what was found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.compiler import CompilerHome, set_up_compiler
from dsops_builder.errors import CommandError, ToolchainError
from dsops_builder.fetch import DebianMirror
from dsops_builder.model import HostCompiler, Package, Pairing, Toolkit, TorchOrigin
from dsops_builder.toolkit import check_cuda_home, set_up_toolkit
from dsops_builder.torchenv import EnvironmentFactory

MakeRunner = Callable[[Callable[[Sequence[str]], str]], Any]
EMPTY = Package(path="pool/main/a/a/a_1_amd64.deb", sha256=hashlib.sha256(b"").hexdigest())
VERSION = "Cuda compilation tools, release 11.8, V11.8.89\nBuild cuda_11.8.r11.8/compiler.31833905_0\n"
HEADERS = [
    "cuda.h",
    "cuda_runtime.h",
    "cuda_fp16.h",
    "cuda_bf16.h",
    "cublas_v2.h",
    "cublasLt.h",
    "cusparse.h",
    "cusolverDn.h",
    "curand_kernel.h",
    "thrust/complex.h",
    "cub/cub.cuh",
    "cuda/std/type_traits",
    "crt/host_config.h",
]


@pytest.fixture
def cuda_home(tmp_path: Path) -> Path:
    for header in HEADERS:
        path = tmp_path / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def test_a_whole_toolkit_of_the_right_release_passes(cuda_home: Path, fake_runner: MakeRunner) -> None:
    check_cuda_home(cuda_home, "11.8.89", fake_runner(lambda _: VERSION))


@pytest.mark.parametrize(
    ("printed", "found"),
    [(VERSION.replace("11.8.89", "12.1.105"), "12.1.105"), ("no version here", "'no version here'")],
    ids=["another release", "not nvcc"],
)
def test_another_nvcc_is_refused(cuda_home: Path, fake_runner: MakeRunner, printed: str, found: str) -> None:
    with pytest.raises(ToolchainError) as refusal:
        check_cuda_home(cuda_home, "11.8.89", fake_runner(lambda _: printed))
    assert str(refusal.value) == f"{cuda_home}/bin/nvcc is {found}, and the matrix states 11.8.89"


def test_missing_headers_are_all_named(cuda_home: Path, fake_runner: MakeRunner) -> None:
    for header in ("cusparse.h", "thrust/complex.h"):
        (cuda_home / "include" / header).unlink()
    with pytest.raises(ToolchainError, match=r"include lacks cusparse\.h, thrust/complex\.h; the toolkit's package"):
        check_cuda_home(cuda_home, "11.8.89", fake_runner(lambda _: VERSION))


def test_a_toolkit_that_cannot_be_laid_out_leaves_nothing(tmp_path: Path, fake_runner: MakeRunner) -> None:
    def fail(command: Sequence[str]) -> str:
        raise CommandError(f"{command[0]}: no")

    toolkit = Toolkit(provider="debian", release="11.8.89", packages=(EMPTY,))
    runner = fake_runner(fail)
    cached = tmp_path / "debian" / f"{EMPTY.sha256[:12]}-a_1_amd64.deb"
    cached.parent.mkdir()
    cached.touch()
    with pytest.raises(CommandError, match="dpkg-deb: no"):
        set_up_toolkit("11.8", toolkit, DebianMirror("", tmp_path, runner), tmp_path, runner)
    assert list((tmp_path / "cuda").iterdir()) == []


def test_a_compiler_of_another_version_is_refused(tmp_path: Path, fake_runner: MakeRunner) -> None:
    spec = HostCompiler(
        name="gcc-10", version="10.2.1", glibc="2.28", glibcxx="3.4.24", cxxabi="1.3.11", sysroot=(), libraries=()
    )
    runner = fake_runner(lambda _: "12.2.0\n")
    with pytest.raises(ToolchainError, match=r"bin/g\+\+ is version 12\.2\.0, and build_matrix\.yaml says 10\.2\.1"):
        set_up_compiler(spec, DebianMirror("", tmp_path, runner), tmp_path, runner)
    # A second try must not take the refused one for good.
    with pytest.raises(ToolchainError):
        set_up_compiler(spec, DebianMirror("", tmp_path, runner), tmp_path, runner)


@dataclass
class Machine:
    """Answers what the environment asks: a Python 3.12 whose include folder and torch are given."""

    include: Path
    abi: int = 1

    def __call__(self, command: Sequence[str]) -> str:
        text = " ".join(command)
        if "version_info" in text:
            return "3.12\n"
        if "get_path" in text:
            return f"{self.include}\n"
        if "import torch" in text:
            return f"a warning\n2.7.1+cu126 {self.abi} /env/site-packages/torch/__init__.py\n"
        if "download" in command:
            (Path(command[-1]) / "torch-2.7.1-cp312-cp312-manylinux_2_28_x86_64.whl").write_bytes(b"torch")
        return ""


@pytest.fixture
def prepare(tmp_path: Path, fake_runner: MakeRunner) -> Callable[[Machine], Any]:
    """Sets up the environment of torch 2.7.1 on a machine."""

    def run(machine: Machine) -> Any:
        runner = fake_runner(machine)
        home = CompilerHome(
            key="k", gcc=tmp_path / "gcc", gxx=tmp_path / "g++", strip=tmp_path / "strip", link_flags=(), description=""
        )
        factory = EnvironmentFactory(
            requirements=("wheel==0.45.1",),
            headers={},
            compiler=home,
            mirror=DebianMirror("", tmp_path, runner),
            cache=tmp_path,
            runner=runner,
        )
        pairing = Pairing(torch="2.7.1", cxx11_abi=1, pythons=("3.12",))
        return factory.set_up(
            pairing, "3.12", Path("/usr/bin/python3.12"), TorchOrigin(requirement="torch==2.7.1", index=None, note="n")
        )

    return run


def test_an_interpreter_with_headers_needs_none_of_ours(prepare: Callable[[Machine], Any], tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    env = prepare(Machine(include=tmp_path))
    assert "CPLUS_INCLUDE_PATH" not in dict(env.variables)
    assert env.torch_version == "2.7.1+cu126"
    assert env.torch_lib == Path("/env/site-packages/torch/lib")
    assert env.description.startswith("torch 2.7.1+cu126 (torch-2.7.1-cp312-cp312-manylinux_2_28_x86_64.whl, sha256 ")


def test_an_interpreter_without_headers_anywhere_is_refused(prepare: Callable[[Machine], Any], tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"^/usr/bin/python3\.12 has no Python\.h .* under python_headers$"):
        prepare(Machine(include=tmp_path / "not-there"))


def test_a_torch_of_the_other_abi_cannot_stand_in(prepare: Callable[[Machine], Any], tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    with pytest.raises(ToolchainError, match=r"has C\+\+11 ABI 0, and the pairing torch 2\.7\.1 .* has 1; its headers"):
        prepare(Machine(include=tmp_path, abi=0))
