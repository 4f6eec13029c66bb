from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsops_prebuilt import UsageError
from dsops_prebuilt._host import Host, MachineHost, detect
from dsops_prebuilt._manifest import closure_sha256
from dsops_prebuilt._variant import CudaRelease, Gpu, Libc, Simd, simd_of

CPUINFO = Path(__file__).parents[2] / "data" / "cpuinfo"


@pytest.mark.parametrize(
    ("name", "machine", "level"),
    [
        ("amd-epyc-avx2", "x86_64", Simd.X86_64_V3),
        ("intel-icelake-avx512", "x86_64", Simd.X86_64_V4),
        ("qemu-baseline", "x86_64", Simd.X86_64),
        ("zhaoxin-unknown-vendor", "x86_64", Simd.X86_64_V3),
        ("mixed-avx512-and-avx2", "x86_64", Simd.X86_64_V3),
        ("avx512-masked-by-hypervisor", "x86_64", Simd.X86_64_V3),
        ("haswell-without-movbe", "x86_64", Simd.X86_64),
        ("neoverse-n1-aarch64", "aarch64", Simd.AARCH64),
        ("neoverse-n1-aarch64", "x86_64", None),
        ("amd-epyc-avx2", "ppc64le", None),
        ("amd-epyc-avx2", "x86_64 (32-bit)", None),
    ],
)
def test_simd_of_recorded_processors(name: str, machine: str, level: Simd | None) -> None:
    assert simd_of((CPUINFO / f"{name}.txt").read_text(), machine) is level


V4_FEATURES = [
    "avx",
    "avx2",
    "bmi1",
    "bmi2",
    "f16c",
    "fma",
    "abm",
    "movbe",
    "xsave",
    "avx512f",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512vl",
]


@pytest.mark.parametrize("lacking", V4_FEATURES)
def test_every_feature_of_a_level_counts(lacking: str) -> None:
    flags = " ".join(name for name in V4_FEATURES if name != lacking)
    below = Simd.X86_64_V3 if lacking.startswith("avx512") else Simd.X86_64
    assert simd_of(f"flags\t\t: {flags}\n", "x86_64") is below


class Linux(MachineHost):
    """A host whose processor is x86_64 whatever runs the tests."""

    machine = "x86_64"


def proc_of(tmp_path: Path, name: str = "intel-icelake-avx512") -> str:
    (tmp_path / "cpuinfo").write_bytes((CPUINFO / f"{name}.txt").read_bytes())
    return str(tmp_path)


@pytest.mark.parametrize("wanted", ["x86_64", "x86_64_v3", "x86_64_v4"])
def test_a_lower_level_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("DSOPS_SIMD", wanted)
    assert Linux(proc_of(tmp_path)).simd is Simd.parse(wanted)


@pytest.mark.parametrize(
    ("wanted", "cpuinfo", "message"),
    [
        ("x86_64_v4", "amd-epyc-avx2", "DSOPS_SIMD=x86_64_v4: this processor has x86_64_v3; "),
        ("aarch64", "amd-epyc-avx2", "DSOPS_SIMD=aarch64: this processor has x86_64_v3; "),
        ("x86_64", "neoverse-n1-aarch64", "DSOPS_SIMD=x86_64: this processor's level is unknown; "),
        ("avx2", "amd-epyc-avx2", "DSOPS_SIMD=avx2: accepted: x86_64, x86_64_v3, x86_64_v4, aarch64"),
    ],
)
def test_no_other_level_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, cpuinfo: str, message: str
) -> None:
    monkeypatch.setenv("DSOPS_SIMD", wanted)
    with pytest.raises(UsageError) as caught:
        _ = Linux(proc_of(tmp_path, cpuinfo)).simd
    assert str(caught.value).startswith(message)


def test_without_cpuinfo_the_level_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSOPS_SIMD", raising=False)
    assert Linux(str(tmp_path)).simd is None


def test_this_machine_answers() -> None:
    host: Host = detect()
    assert host is detect()
    assert host.python is not None
    assert host.python.startswith(f"cp{sys.version_info[0]}{sys.version_info[1]}")
    assert host.system == {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}[sys.platform]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc and musl are Linux's")
def test_this_libc_answers() -> None:
    assert MachineHost().libc is None or str(MachineHost().libc).partition(" ")[0] in ("glibc", "musl")


@pytest.mark.parametrize(("libc", "text"), [(Libc("glibc", (2, 17)), "glibc 2.17"), (Libc("musl"), "musl")])
def test_libc_in_words(libc: Libc, text: str) -> None:
    assert str(libc) == text


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path entry with a DeepSpeed that fails when it is imported."""
    csrc = tmp_path / "site" / "deepspeed" / "ops" / "csrc"
    csrc.mkdir(parents=True)
    (csrc / "a.cpp").write_text("a")
    (tmp_path / "site/deepspeed/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    return csrc


def test_installed_sources_are_found_and_hashed_once_without_importing_deepspeed(site: Path) -> None:
    host = MachineHost()
    assert host.csrc == str(site)
    digest = host.closure_digest(("a.cpp",))
    assert digest == closure_sha256(site, ["a.cpp"])
    (site / "a.cpp").write_text("changed")
    assert host.closure_digest(("a.cpp",)) == digest
    assert host.closure_digest(("a.cpp", "not-there.h")) is None


def test_without_sources_there_is_no_digest(site: Path) -> None:
    (site / "a.cpp").unlink()
    site.rmdir()
    assert (MachineHost().csrc, MachineHost().closure_digest(("a.cpp",))) == (None, None)


class FakeNvml:
    """NVIDIA's library with these GPUs; ``failing`` names the function that returns an error."""

    def __init__(self, *gpus: tuple[str, int, int], driver: int = 12040, failing: str = "") -> None:
        self.gpus, self.driver, self.failing, self.shut = gpus, driver, failing, 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        answers: dict[str, Callable[..., int]] = {
            "nvmlInit_v2": lambda: 0,
            "nvmlShutdown": self.shutdown,
            "nvmlDeviceGetCount_v2": lambda count: put(count, len(self.gpus)),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, device: put(device, index.value + 1),
            "nvmlDeviceGetUUID": self.uuid,
            "nvmlDeviceGetCudaComputeCapability": self.capability,
            "nvmlSystemGetCudaDriverVersion_v2": lambda number: put(number, self.driver),
        }
        return (lambda *_: 9) if name == self.failing else answers[name]

    def shutdown(self) -> int:
        self.shut += 1
        return 0

    def uuid(self, device: ctypes.c_void_p, text: Any, size: ctypes.c_uint) -> int:
        assert size.value == len(text)
        text.value = self.gpus[(device.value or 0) - 1][0].encode()
        return 0

    def capability(self, device: ctypes.c_void_p, major: Any, minor: Any) -> int:
        gpu = self.gpus[(device.value or 0) - 1]
        return put(major, gpu[1]) or put(minor, gpu[2])


def put(reference: Any, value: int) -> int:
    reference._obj.value = value  # noqa: SLF001 - what ctypes.byref points to
    return 0


A100, GTX = ("GPU-aaaa-1", 8, 0), ("GPU-bbbb-2", 6, 1)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No torch in the process and no word about visible devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    return monkeypatch


@pytest.mark.usefixtures("plain")
def test_gpus_from_nvml() -> None:
    library = FakeNvml(A100, GTX)
    host = MachineHost(nvml=library)
    assert host.gpus() == (Gpu(*A100), Gpu(*GTX))
    assert host.driver == CudaRelease(12, 4)
    assert library.shut == 1


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("GPU-aaaa-1", ["GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]),
        ("GPU-bbbb-2, GPU-aaaa-1", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("GPU-cccc", []),
        ("0", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("GPU-aaaa-1,1", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("MIG-1234", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_narrow_only_by_uuid(plain: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    plain.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = MachineHost(nvml=FakeNvml(A100, GTX)).gpus()
    assert gpus is not None
    assert [gpu.name for gpu in gpus] == names


@pytest.mark.parametrize(
    "failing",
    [
        "nvmlInit_v2",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetCudaComputeCapability",
    ],
)
def test_where_nvml_fails_the_gpus_are_unknown(plain: pytest.MonkeyPatch, failing: str) -> None:
    plain.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert MachineHost(nvml=FakeNvml(A100, failing=failing)).gpus() is None


@pytest.mark.usefixtures("plain")
def test_where_nvml_fails_the_driver_is_unknown() -> None:
    host = MachineHost(nvml=FakeNvml(A100, failing="nvmlSystemGetCudaDriverVersion_v2"))
    assert (host.gpus(), host.driver) == ((Gpu(*A100),), None)


@pytest.mark.usefixtures("plain")
def test_without_nvml_gpus_and_driver_are_unknown() -> None:
    host = MachineHost(nvml="libdsops-no-such-library.so.1")
    assert (host.gpus(), host.driver) == (None, None)


def torch_of(**cuda: Any) -> SimpleNamespace:
    facts = {
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2,
        "get_device_capability": lambda index: (9, index),
    }
    return SimpleNamespace(cuda=SimpleNamespace(**{**facts, **cuda}))


def test_once_there_is_a_cuda_context_torch_is_asked(plain: pytest.MonkeyPatch) -> None:
    plain.setitem(sys.modules, "torch", torch_of())
    assert MachineHost(nvml=FakeNvml(GTX)).gpus() == (Gpu("cuda:0", 9, 0), Gpu("cuda:1", 9, 1))


@pytest.mark.parametrize(
    "fact", [{"is_initialized": lambda: False}, {"_is_in_bad_fork": lambda: True}], ids=["none", "fork"]
)
def test_without_a_usable_context_torch_is_not_asked(plain: pytest.MonkeyPatch, fact: dict[str, Any]) -> None:
    plain.setitem(sys.modules, "torch", torch_of(**fact))
    assert MachineHost(nvml=FakeNvml(GTX)).gpus() == (Gpu(*GTX),)


@pytest.mark.parametrize(
    ("tree", "is_jetson"), [(b"nvidia,p3737\0nvidia,tegra234\0", True), (b"arm,foundation\0", False), (None, False)]
)
def test_a_jetson_is_known_by_its_device_tree(tmp_path: Path, tree: bytes | None, is_jetson: bool) -> None:
    if tree is not None:
        (tmp_path / "device-tree").mkdir()
        (tmp_path / "device-tree/compatible").write_bytes(tree)
    assert MachineHost(proc=str(tmp_path)).tegra is is_jetson


def program(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/false\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder with a compiler and ninja, and a CUDA_HOME that is another."""
    for name in ("CXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("c++", "ninja"):
        program(tmp_path / "bin", name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return tmp_path


def obstacles(*, needs_cuda: bool) -> list[str]:
    """All but the header's, which depends on how this interpreter was installed."""
    return [phrase for phrase in MachineHost().jit_obstacles(needs_cuda) if "headers" not in phrase]


def test_nothing_is_missing_where_everything_is(tools: Path) -> None:
    program(tools / "cuda/bin", "nvcc")
    assert obstacles(needs_cuda=True) == []


def test_a_missing_compiler_and_ninja_are_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tools))
    assert obstacles(needs_cuda=False) == ["a C++ compiler (c++ is not on PATH)", "ninja (it is not on PATH)"]


def test_cxx_names_the_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++-17 -Wall")
    assert obstacles(needs_cuda=False) == ["a C++ compiler (clang++-17 -Wall is not on PATH)"]
    program(tools / "bin", "clang++-17")
    assert obstacles(needs_cuda=False) == []


def test_nvcc_counts_only_where_cuda_is_needed(tools: Path) -> None:
    assert obstacles(needs_cuda=False) == []
    assert obstacles(needs_cuda=True) == [f"the CUDA compiler ({tools}/cuda/bin/nvcc is not there)"]


def test_cuda_home_follows_nvcc_on_path_where_it_is_unset(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    program(tools / "bin", "nvcc")
    assert obstacles(needs_cuda=True) == []


def test_missing_headers_are_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tools)})
    assert MachineHost().jit_obstacles(needs_cuda=False) == (f"Python's headers ({tools}/Python.h is not there)",)


@pytest.mark.parametrize(("value", "answer"), [("x", "x"), ("", None), (None, None)])
def test_settings(monkeypatch: pytest.MonkeyPatch, value: str | None, answer: str | None) -> None:
    if value is None:
        monkeypatch.delenv("DSOPS_ON_MISS", raising=False)
    else:
        monkeypatch.setenv("DSOPS_ON_MISS", value)
    assert MachineHost().setting("DSOPS_ON_MISS") == answer


def test_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        __version__="2.7.1+cu126", version=SimpleNamespace(cuda="12.6"), _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    build = MachineHost().torch
    assert build is not None
    assert (build.version, build.cuda, build.hip, build.cxx11_abi) == ("2.7.1+cu126", "12.6", None, True)


def test_a_torch_that_cannot_be_imported_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert MachineHost().torch is None


def test_the_release_of_an_imported_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="0.17.1"))
    assert MachineHost().deepspeed == "0.17.1"


def test_no_process_is_started(tools: Path) -> None:
    started = []
    sys.addaudithook(
        lambda event, _: started.append(event) if event in ("os.posix_spawn", "os.fork", "subprocess.Popen") else None
    )
    host = MachineHost(nvml="libdsops-no-such-library.so.1")
    _ = (host.python, host.system, host.machine, host.libc, host.simd, host.csrc, host.deepspeed, host.gpus())
    host.jit_obstacles(needs_cuda=True)
    assert started == []
    assert os.environ["PATH"] == str(tools / "bin")


def test_dsops_simd_counts_whenever_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSOPS_SIMD", raising=False)
    host = Linux(proc_of(tmp_path))
    assert host.simd is Simd.X86_64_V4
    monkeypatch.setenv("DSOPS_SIMD", "x86_64_v3")
    assert (host.simd, host.processor) == (Simd.X86_64_V3, Simd.X86_64_V4)


def test_a_wrong_word_of_dsops_simd_names_the_variable_and_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSOPS_SIMD", "x86-64-v3")
    with pytest.raises(UsageError, match=r"^DSOPS_SIMD=x86-64-v3: did you mean x86_64_v3\? accepted: "):
        _ = MachineHost().simd
