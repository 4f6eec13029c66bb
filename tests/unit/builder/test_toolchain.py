"""Compiler, toolkit and environment are what the matrix says, or are refused with what was found."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from dsops_builder.compiler import CompilerHome, set_up_compiler
from dsops_builder.errors import CommandError, MatrixError, ToolchainError
from dsops_builder.fetch import DebianMirror
from dsops_builder.matrix import load_matrix
from dsops_builder.model import HostCompiler, Package, Pairing, Toolkit, TorchOrigin
from dsops_builder.toolkit import check_cuda_home, set_up_toolkit
from dsops_builder.torchenv import EnvironmentFactory

MakeRunner = Callable[[Callable[[Sequence[str]], str]], Any]
ROOT = Path(__file__).parents[3]
CAPPED = (
    "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1",
)  # fmt: skip
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


def gcc_for(machine: Literal["x86_64", "aarch64"]) -> HostCompiler:
    return HostCompiler(
        machine=machine,
        name="gcc-10",
        version="10.2.1",
        glibc="2.28",
        glibcxx="3.4.24",
        cxxabi="1.3.11",
        sysroot=(EMPTY,),
        libraries=(),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "compiler:\n  name",
            "compiler:\n  machine: aarch64\n  name",
            "compiler: found a mapping, accepted a compiler for x86_64; others are for cross_compilers",
        ),
        (
            "    machine: aarch64\n",
            "",
            "cross_compilers: found a mapping, accepted compilers whose machine is their key",
        ),
    ],
    ids=["the machine's own for another", "another's for the machine"],
)
def test_a_compiler_for_the_wrong_machine_is_a_fault_of_the_matrix(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    shutil.copytree(ROOT / "ops", tmp_path / "ops")
    text = (ROOT / "build_matrix.yaml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "build_matrix.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")

    with pytest.raises(MatrixError) as refusal:
        load_matrix(tmp_path / "build_matrix.yaml")
    (fault,) = str(refusal.value).splitlines()
    assert fault.endswith(message)


@dataclass
class GccPackage:
    """Answers what is asked of a compiler whose package has the libraries ``files``, all of them copies of ``library``.

    ``stubs`` are those that it was asked to link.
    """

    files: Sequence[str]
    library: Path
    version: str = "10.2.1"
    stubs: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> str:
        if command[0] == "dpkg-deb":
            for name in self.files:
                path = Path(command[-1]) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.library, path)
            return ""
        if command[-1] == "-dumpfullversion":
            return f"{self.version}\n"
        output = Path(command[command.index("-o") + 1])
        self.stubs.append(output.name)
        output.touch()
        return ""


@pytest.fixture
def gcc_package(elf_samples: Path) -> Callable[..., GccPackage]:
    """Makes the package of a compiler whose libraries lie in the folder of its argument."""

    def make(*files: str, folder: str = "lib/x86_64-linux-gnu", **changes: Any) -> GccPackage:
        libraries = [f"{folder}/{soname}" for soname in CAPPED]
        return GccPackage(files=[*libraries, *files], library=elf_samples / "host.so", **changes)

    return make


@pytest.fixture
def set_up(tmp_path: Path, fake_runner: MakeRunner) -> Callable[[GccPackage, HostCompiler], CompilerHome]:
    """Sets a compiler up whose one package is in the cache."""
    cached = tmp_path / "debian" / f"{EMPTY.sha256[:12]}-a_1_amd64.deb"
    cached.parent.mkdir()
    cached.touch()

    def run(package: GccPackage, spec: HostCompiler) -> CompilerHome:
        runner = fake_runner(package)
        return set_up_compiler(spec, DebianMirror("", tmp_path, runner), tmp_path, runner)

    return run


SetUp = Callable[[GccPackage, HostCompiler], CompilerHome]


def test_a_compiler_of_another_version_is_refused(gcc_package: Callable[..., GccPackage], set_up: SetUp) -> None:
    # A second try must not take the refused one for good.
    for _ in range(2):
        with pytest.raises(
            ToolchainError, match=r"bin/g\+\+ is version 12\.2\.0, and build_matrix\.yaml says 10\.2\.1$"
        ):
            set_up(gcc_package(version="12.2.0"), gcc_for("x86_64"))


def test_the_machines_own_compiler(gcc_package: Callable[..., GccPackage], set_up: SetUp) -> None:
    package = gcc_package()
    home = set_up(package, gcc_for("x86_64"))
    root = home.gcc.parents[1]

    assert (home.machine, home.sysroot) == ("x86_64", None)
    assert f"exec {root}/sysroot/usr/bin/x86_64-linux-gnu-g++-10 --sysroot=" in home.gxx.read_text()
    assert (root / "stubs/libc.so").read_text() == (
        f"OUTPUT_FORMAT(elf64-x86-64)\nGROUP ( {root}/stubs/libc.so.6 "
        f"{root}/sysroot/usr/lib/x86_64-linux-gnu/libc_nonshared.a "
        f"AS_NEEDED ( {root}/stubs/libpthread.so.0 {root}/sysroot/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 ) )\n"
    )
    assert package.stubs == list(CAPPED)
    assert (root / "stubs/libm.so").readlink() == Path("libm.so.6")


def test_a_compiler_for_another_machine(gcc_package: Callable[..., GccPackage], set_up: SetUp) -> None:
    # Its binutils bring libraries of the machine that they run on.
    package = gcc_package("usr/lib/x86_64-linux-gnu/libbfd-arm64.so", folder="usr/aarch64-linux-gnu/lib")
    home = set_up(package, gcc_for("aarch64"))
    root = home.gcc.parents[1]

    assert (home.machine, home.sysroot) == ("aarch64", root / "sysroot/usr/aarch64-linux-gnu")
    assert f"exec {root}/sysroot/usr/bin/aarch64-linux-gnu-strip " in home.strip.read_text()
    assert [path.name for path in (root / "libraries").iterdir()] == ["libbfd-arm64.so"]
    assert (root / "stubs/libc.so").read_text() == (
        f"OUTPUT_FORMAT(elf64-littleaarch64)\nGROUP ( {root}/stubs/libc.so.6 "
        f"{root}/sysroot/usr/aarch64-linux-gnu/lib/libc_nonshared.a "
        f"AS_NEEDED ( {root}/stubs/libpthread.so.0 {root}/sysroot/usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1 ) )\n"
    )
    assert package.stubs == list(CAPPED)


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
            key="k",
            machine="x86_64",
            sysroot=None,
            gcc=tmp_path / "gcc",
            gxx=tmp_path / "g++",
            strip=tmp_path / "strip",
            link_flags=(),
            description="",
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
