"""Each gate on one shared object, with facts made for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsops_builder.elf import Elf
from dsops_builder.fatbin import GpuCode
from dsops_builder.gates import (
    check_build_paths,
    check_exports,
    check_gpu_code,
    check_identity,
    check_instructions,
    check_needed,
    check_record_of,
    check_search_paths,
    check_symbols,
)
from dsops_builder.isa import Instructions, Use
from dsops_prebuilt._manifest import Artifact, CudaBinding, TorchBinding
from dsops_prebuilt._variant import CudaRelease, GpuArch, Simd

_FILE = "p/cu118/sample_op.cpython-311-x86_64-linux-gnu.so"
_ELF = Elf(
    machine="x86_64",
    needed=("libtorch_cpu.so", "libc.so.6"),
    soname=None,
    search_paths=(),
    versions=(("libc.so.6", ("GLIBC_2.14",)),),
    unversioned=(),
    defined=frozenset({"PyInit_sample_op"}),
    gpu_code=False,
)
_HOST = Artifact(
    file="sample_op.cpython-311-x86_64-linux-gnu.so",
    sha256="0" * 64,
    size=10,
    tier="stock",
    op="sample",
    accelerators=("cpu",),
    module="deepspeed.ops.sample.sample_op",
    machine="x86_64",
    simd=Simd.X86_64_V3,
    glibc=(2, 14),
    python="cp311",
    torch=TorchBinding(minor="2.7", exact=None, cxx11_abi=True, built_with="2.7.1"),
    cuda=None,
    sources=(),
    defines=(),
    needed=("libtorch_cpu.so", "libc.so.6"),
)
_CODE = GpuCode(sass=(GpuArch(8, 0), GpuArch(9, 0)), ptx=(GpuArch(9, 0),))
_CUDA = replace(_HOST, cuda=CudaBinding(toolkit=CudaRelease(11, 8), sass=_CODE.sass, ptx=_CODE.ptx))
_PORTABLE = replace(_HOST, python=None, torch=None, tier="portable")
_ABI = (
    "dsops_abi, dsops_bind_openmp, dsops_call, dsops_count, dsops_entry, dsops_failure, dsops_name, dsops_openmp_of, "
    "dsops_released, dsops_signature"
)
_LIBRARY = replace(_ELF, needed=("libc.so.6",), defined=frozenset(_ABI.split(", ")))


def _needed(*libraries: str) -> Elf:
    return replace(_ELF, needed=libraries)


@pytest.mark.parametrize(
    ("artifact", "library", "allowed"),
    [
        pytest.param(_HOST, "libtorch_python.so", True, id="host op, libtorch_python"),
        pytest.param(_HOST, "libpthread.so.0", True, id="host op, libpthread"),
        pytest.param(_HOST, "libtorch_cuda.so", False, id="host op, libtorch_cuda"),
        pytest.param(_HOST, "libcudart.so.11.0", False, id="host op, libcudart"),
        pytest.param(_HOST, "libcuda.so.1", False, id="host op, libcuda"),
        pytest.param(_HOST, "libcurand.so.10", False, id="host op, libcurand"),
        pytest.param(_HOST, "libgomp.so.1", False, id="host op, libgomp"),
        pytest.param(_CUDA, "libcudart.so.11.0", True, id="cuda op, libcudart of its toolkit"),
        pytest.param(_CUDA, "libcudart.so.12", False, id="cuda op, libcudart of another toolkit"),
        pytest.param(_CUDA, "libc10_cuda.so", True, id="cuda op, libc10_cuda"),
        pytest.param(_CUDA, "libtorch_cuda.so", True, id="cuda op, libtorch_cuda"),
        pytest.param(_CUDA, "libcublas.so.11", False, id="cuda op, libcublas"),
        pytest.param(_PORTABLE, "libstdc++.so.6", True, id="portable, libstdc++"),
        pytest.param(_PORTABLE, "ld-linux-aarch64.so.1", True, id="portable, the loader of aarch64"),
        pytest.param(_PORTABLE, "libc10.so", False, id="portable, libc10"),
        pytest.param(_PORTABLE, "libtorch_cpu.so", False, id="portable, libtorch_cpu"),
        pytest.param(_PORTABLE, "libgomp.so.1", False, id="portable, libgomp"),
        pytest.param(_PORTABLE, "libiomp5.so", False, id="portable, libiomp5"),
        pytest.param(_PORTABLE, "libpython3.11.so.1.0", False, id="portable, libpython"),
        pytest.param(_PORTABLE, "libdl.so.2", False, id="portable, libdl"),
    ],
)
def test_needed(artifact: Artifact, library: str, allowed: bool) -> None:
    found = list(check_needed(_FILE, _needed("libc.so.6", library), artifact))
    assert [failure.found for failure in found] == ([] if allowed else [library])


def test_needed_of_cuda_12() -> None:
    artifact = replace(_CUDA, cuda=CudaBinding(toolkit=CudaRelease(12, 4), sass=(), ptx=()))
    assert not list(check_needed(_FILE, _needed("libcudart.so.12"), artifact))
    assert list(check_needed(_FILE, _needed("libcudart.so.11.0"), artifact))


def test_a_failure_says_file_gate_found_and_wanted() -> None:
    (failure,) = check_search_paths(_FILE, replace(_ELF, search_paths=("/build/lib", "$ORIGIN")))
    assert str(failure) == f"{_FILE}: search path: found RPATH or RUNPATH /build/lib:$ORIGIN; wanted none"


def test_identity_holds() -> None:
    assert not list(check_identity(_FILE, _ELF, _HOST))
    assert not list(check_identity("portable/adam_v3.so", replace(_ELF, defined=frozenset()), _PORTABLE))


@pytest.mark.parametrize(
    ("file", "elf", "artifact", "message"),
    [
        pytest.param(
            _FILE,
            replace(_ELF, machine="aarch64"),
            _HOST,
            "machine: found a file for aarch64, listed as x86_64; wanted x86_64, the machine of x86_64_v3",
            id="machine of the file",
        ),
        pytest.param(
            _FILE,
            _ELF,
            replace(_HOST, machine="aarch64"),
            "machine: found a file for x86_64, listed as aarch64; wanted x86_64, the machine of x86_64_v3",
            id="machine in the manifest",
        ),
        pytest.param(
            "p/sample_op.cpython-312-x86_64-linux-gnu.so",
            _ELF,
            _HOST,
            "python: found file name sample_op.cpython-312-x86_64-linux-gnu.so; "
            "wanted sample_op.cpython-311-x86_64-linux-gnu.so",
            id="suffix of another Python",
        ),
        pytest.param(
            _FILE,
            replace(_ELF, defined=frozenset({"PyInit_other"})),
            _HOST,
            "python: found no such function; wanted PyInit_sample_op defined",
            id="another module",
        ),
    ],
)
def test_identity(file: str, elf: Elf, artifact: Artifact, message: str) -> None:
    assert [str(failure) for failure in check_identity(file, elf, artifact)] == [f"{file}: {message}"]


def test_symbols_against_torch(elf_samples: Path) -> None:
    elf = replace(_ELF, unversioned=("GOMP_barrier", "PyModule_Create2", "_Py_NoneStruct", "c10_sample", "nowhere"))
    (failure,) = check_symbols(_FILE, elf, _HOST, {"2.7": elf_samples})
    assert (failure.found, failure.wanted) == (
        "nowhere undefined",
        "every symbol without a version defined by torch 2.7",
    )


def test_symbols_of_the_new_abi_in_an_artifact_of_the_old_one(elf_samples: Path) -> None:
    symbol = "_ZN3c107WarningC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    elf = replace(_ELF, unversioned=("c10_sample", symbol))
    assert _HOST.torch is not None
    old = replace(_HOST, torch=replace(_HOST.torch, cxx11_abi=False))
    wanted = "none of the C++11 ABI, for torch.cxx11_abi is false"
    assert wanted in [failure.wanted for failure in check_symbols(_FILE, elf, old, {"2.7": elf_samples})]
    assert wanted not in [failure.wanted for failure in check_symbols(_FILE, elf, _HOST, {"2.7": elf_samples})]


def test_symbols_without_that_torch(elf_samples: Path) -> None:
    (failure,) = check_symbols(_FILE, _ELF, _HOST, {"2.6": elf_samples})
    assert failure.found == "no library folder of torch 2.7 to look in"


def test_symbols_of_a_portable_artifact_have_nothing_to_come_from() -> None:
    elf = replace(_ELF, unversioned=("GOMP_barrier", "PyModule_Create2"))
    found = [failure.found for failure in check_symbols(_FILE, elf, _PORTABLE, {})]
    assert found == ["GOMP_barrier undefined", "PyModule_Create2 undefined"]


def test_exports_hold() -> None:
    assert not list(check_exports(_FILE, _LIBRARY, _PORTABLE))


def test_a_stock_module_exports_what_it_likes() -> None:
    assert not list(check_exports(_FILE, replace(_ELF, defined=frozenset({"GOMP_parallel"})), _HOST))


@pytest.mark.parametrize(
    ("defined", "message"),
    [
        pytest.param(
            _LIBRARY.defined | {"GOMP_parallel"}, f"found GOMP_parallel; wanted only {_ABI}", id="OpenMP's function"
        ),
        pytest.param(
            _LIBRARY.defined | {"_ZN14Adam_Optimizer6Step_1Ev"},
            f"found _ZN14Adam_Optimizer6Step_1Ev; wanted only {_ABI}",
            id="kernel",
        ),
        pytest.param(
            _LIBRARY.defined | {"dsops_other"}, f"found dsops_other; wanted only {_ABI}", id="function of no ABI"
        ),
        pytest.param(
            _LIBRARY.defined - {"dsops_call"},
            "found no dsops_call; wanted it, for the loader calls it",
            id="no dsops_call",
        ),
    ],
)
def test_exports_of_a_portable_library(defined: frozenset[str], message: str) -> None:
    (failure,) = check_exports(_FILE, replace(_LIBRARY, defined=defined), _PORTABLE)
    assert str(failure) == f"{_FILE}: exports: {message}"


def test_instructions() -> None:
    use = Use(feature="AVX512F", address=16, symbol=None, text="vaddps zmm3,zmm2,zmm1")
    code = Instructions(count=9, uses=(use,), undecodable=(32, 33))
    assert [str(failure) for failure in check_instructions(_FILE, code, _HOST)] == [
        f"{_FILE}: instructions: found vaddps zmm3,zmm2,zmm1 at 0x10 (AVX512F); wanted nothing above x86_64_v3",
        f"{_FILE}: instructions: found 2 undecodable, the first at 0x20; wanted only instructions in executable sections",
    ]
    assert not list(check_instructions(_FILE, replace(code, undecodable=()), replace(_HOST, simd=Simd.X86_64_V4)))


_ASKED = (GpuArch(8, 0), GpuArch(9, 0, "", ptx=True))


def test_gpu_code_holds() -> None:
    assert not list(check_gpu_code(_FILE, _CODE, _CUDA, {"2.7": _ASKED}))
    assert not list(check_gpu_code(_FILE, _CODE, _CUDA, None))


@pytest.mark.parametrize(
    ("code", "archs", "wanted"),
    [
        pytest.param(
            GpuCode(sass=(GpuArch(8, 0),), ptx=_CODE.ptx),
            None,
            ["SASS 8.0 9.0, PTX 9.0, as the manifest lists"],
            id="one fewer than listed",
        ),
        pytest.param(
            _CODE, {"2.7": (GpuArch(8, 0),)}, ["SASS 8.0, PTX none, as asked for torch 2.7"], id="more than asked"
        ),
        pytest.param(_CODE, {"2.6": _ASKED}, ["SASS none, PTX none, as asked for torch 2.7"], id="torch not asked for"),
        pytest.param(
            GpuCode(sass=_CODE.sass, ptx=()),
            {"2.7": _ASKED},
            ["SASS 8.0 9.0, PTX 9.0, as the manifest lists", "SASS 8.0 9.0, PTX 9.0, as asked for torch 2.7"],
            id="no PTX",
        ),
    ],
)
def test_gpu_code(code: GpuCode, archs: dict[str, tuple[GpuArch, ...]] | None, wanted: list[str]) -> None:
    assert [failure.wanted for failure in check_gpu_code(_FILE, code, _CUDA, archs)] == wanted


def test_build_paths() -> None:
    content = b"\x00\x01/home/builder/cache/ds/adam.cpp\x00/usr/include/x.h\x00"
    assert [str(failure) for failure in check_build_paths(_FILE, content, ("/home/builder", "/opt/other"))] == [
        f"{_FILE}: build path: found '/home/builder/cache/ds/adam.cpp'; wanted nothing with /home/builder"
    ]


def test_what_the_manifest_records() -> None:
    assert not list(check_record_of(_FILE, "0" * 64, 10, _ELF, _HOST))
    elf = replace(_needed("libc.so.6"), versions=())
    assert [failure.found for failure in check_record_of(_FILE, "1" * 64, 11, elf, _HOST)] == [
        "sha256 " + "1" * 64,
        "size 11",
        "DT_NEEDED ('libc.so.6',)",
        "glibc (0, 0)",
    ]
