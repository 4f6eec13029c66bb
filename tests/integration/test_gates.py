"""Every gate against a planted fault: compiled C, real auditwheel, a wheel packed, repaired, sealed and verified."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from dsops_builder.core import platform_wheel
from dsops_builder.core.platform_wheel import Contents
from dsops_builder.errors import GateError
from dsops_builder.fatbin import GpuCode, asked_for
from dsops_builder.model import Compiled
from dsops_builder.portable import PortableArtifact
from dsops_builder.process import Shell
from dsops_builder.repair import repair
from dsops_builder.verify import Context, verify_wheel
from dsops_builder.wheel import Payload, pack, seal, write_wheel
from dsops_prebuilt._variant import GpuArch, Simd

CompiledSample = Callable[..., Compiled]
PortableSample = Callable[..., PortableArtifact]
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
_ARCHS = (GpuArch(8, 0), GpuArch(9, 0, "", ptx=True))
_LISTS = {
    "--list-elf": "ELF file    1: op.1.sm_80.cubin\nELF file    2: op.2.sm_90.cubin\n",
    "--list-ptx": "PTX file    1: op.1.sm_90.ptx\n",
}
# An extension module as the dynamic loader sees one: no header of Python's is needed for that.
_MODULE = """
#include <string.h>
void *PyModule_Create2(void *, int);
int c10_sample(int);
static char state[64], from[64];
void *PyInit_sample_op(void) {
  memcpy(state, from, c10_sample(1));
  return PyModule_Create2(state, 1013);
}
"""
_AVX512 = 'void wide(float *x) { __asm__ volatile("vaddps %%zmm1, %%zmm2, %%zmm3" ::: "memory"); }'
_UNDEFINED = "void sem_of_a_newer_libc(void); void use(void) { sem_of_a_newer_libc(); }"
_PATH = 'const char *where(void) { return "/build/cache/sample.cpp"; }'
_PARALLEL = "void spread(float *x) {\n#pragma omp parallel for\nfor (int i = 0; i < 64; i++) x[i] = i; }"
_ABI = (
    "abi", "bind_openmp", "call", "count", "entry", "failure", "name", "openmp_of", "released", "signature",
)  # fmt: skip
_LIBRARY = "".join(f"int dsops_{name}(void) {{ return 0; }}\n" for name in _ABI)
_FATBIN = '__attribute__((section(".nv_fatbin"), used)) static const char blob[64] = {1};'


@dataclass(frozen=True)
class Workshop:
    """Compiles samples and takes them through the pipeline, in a folder of its own."""

    cc: Path
    folder: Path
    make: CompiledSample

    @property
    def torch_lib(self) -> Path:
        """What stands for torch/lib, and for the toolkit's libraries at link time."""
        return self.folder / "torch"

    def build(self, output: Path, source: str, *flags: str) -> Path:
        output.parent.mkdir(parents=True, exist_ok=True)
        code = output.with_suffix(".c")
        code.write_text(source)
        common = ["-shared", "-fPIC", "-O1", "-s", "-Wl,--as-needed", "-o", str(output), str(code)]
        Shell().run([str(self.cc), *common, f"-L{self.torch_lib}", *flags])
        code.unlink()
        return output

    def libraries(self) -> None:
        self.build(self.torch_lib / "libc10.so", "int c10_sample(int x) { return x; }", "-Wl,-soname,libc10.so")
        self.build(
            self.folder / "cuda/libcurand.so", "int curand_sample(void) { return 4; }", "-Wl,-soname,libcurand.so.10"
        )

    def op(self, extra: str = "", *flags: str, kernel: str = "host", **changes: Any) -> Compiled:
        links = ("-lc10", f"-L{self.folder / 'cuda'}", *flags)
        return self.make(self.build(self.folder / "built.so", _MODULE + extra, *links), kernel=kernel, **changes)

    def payload(self, compiled: Compiled) -> Payload:
        return Payload(version="0.1.0", compiled=(compiled,))

    def finish(self, compiled: Compiled) -> Path:
        """Pack, repair with the real auditwheel, seal."""
        payload = self.payload(compiled)
        raw = pack(payload, self.folder / "raw")
        repaired = repair(raw, into=self.folder / "repaired", runner=Shell(), environment=_ENVIRONMENT)
        return seal(repaired, payload, self.folder / "dist", gpu_code=_gpu_code)

    def claim(self, compiled: Compiled, platform: str = "manylinux_2_17_x86_64") -> Path:
        """Pack and seal under a tag that nobody proved, for files that repair refuses already."""
        payload = self.payload(compiled)
        raw = pack(payload, self.folder / "raw")
        claimed = raw.rename(raw.with_name(raw.name.replace("linux_x86_64", platform)))
        return seal(claimed, payload, self.folder / "dist", gpu_code=_gpu_code)

    def context(self, **changes: Any) -> Context:
        base = Context(
            runner=_Cuobjdump(),
            cuobjdump=Path("cuobjdump"),
            torch_libs={"2.7": self.torch_lib},
            archs={},
            forbidden=("/build/cache",),
        )
        return replace(base, **changes)


def _gpu_code(path: Path) -> GpuCode:
    del path
    return asked_for(_ARCHS)


class _Cuobjdump:
    """There is no GPU code to list in what a C compiler makes."""

    def run(self, command: Sequence[str], **options: Any) -> str:
        del options
        return _LISTS[command[1]]


@pytest.fixture
def shop(cc: Path, tmp_path: Path, compiled_sample: CompiledSample) -> Workshop:
    workshop = Workshop(cc=cc, folder=tmp_path / "shop", make=compiled_sample)
    workshop.libraries()
    return workshop


def _refused(path: Path, context: Context) -> str:
    with pytest.raises(GateError) as caught:
        verify_wheel(path, context)
    return str(caught.value)


def _edit(path: Path, change: Callable[[dict[str, bytes]], None], name: str | None = None) -> Path:
    """The wheel with its members changed and a RECORD that fits them again."""
    with ZipFile(path) as archive:
        contents = {member: archive.read(member) for member in archive.namelist() if not member.endswith("/RECORD")}
    change(contents)
    return write_wheel(path.parent / "edited" / (name or path.name), contents)


def test_a_wheel_without_a_fault(shop: Workshop) -> None:
    path = shop.finish(shop.op())
    assert "-manylinux" in path.name
    assert "-linux_x86_64" not in path.name
    checked = verify_wheel(path, shop.context())
    assert checked[1].endswith("instructions up to x86_64, DT_NEEDED, search paths, symbols against torch 2.7")


def test_a_second_run_gives_the_same_bytes(shop: Workshop, tmp_path: Path) -> None:
    compiled = shop.op()
    first = shop.finish(compiled)
    again = replace(shop, folder=tmp_path / "again").finish(compiled)
    assert first.name == again.name
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        pytest.param(_AVX512, (), "instructions: found vaddps zmm3,zmm2,zmm1 at ", id="AVX-512 in a v3 file"),
        pytest.param(_UNDEFINED, (), "symbols: found sem_of_a_newer_libc undefined", id="undefined symbol"),
        pytest.param("", ("-Wl,-rpath,/opt/lib",), "search path: found RPATH or RUNPATH /opt/lib", id="RUNPATH"),
        pytest.param(_PATH, (), "build path: found '/build/cache/sample.cpp'", id="build path"),
        pytest.param("", ("-Wl,--no-as-needed", "-lcurand"), "DT_NEEDED: found libcurand.so.10", id="libcurand"),
        pytest.param(_FATBIN, (), "GPU code: found GPU code; wanted none", id="GPU code in a host op"),
        pytest.param("", ("-DPyInit_sample_op=PyInit_other",), "python: found no such function", id="another module"),
    ],
)
def test_a_fault_in_the_file(shop: Workshop, source: str, flags: tuple[str, ...], message: str) -> None:
    path = shop.finish(shop.op(source, *flags, simd=Simd.X86_64_V3))
    refusal = _refused(path, shop.context())
    assert f"/sample_op.cpython-311-x86_64-linux-gnu.so: {message}" in refusal
    assert refusal.startswith(f"{path.name}: 1 failed:")


def test_avx512_passes_where_it_is_allowed(shop: Workshop) -> None:
    verify_wheel(shop.finish(shop.op(_AVX512, simd=Simd.X86_64_V4)), shop.context())


def test_a_second_openmp_runtime(shop: Workshop) -> None:
    compiled = shop.op(_PARALLEL, "-fopenmp")
    with pytest.raises(GateError, match=r"because of .*libgomp\.so\.1, which the tag does not allow"):
        shop.finish(compiled)
    refusal = _refused(shop.claim(compiled), shop.context())
    assert ": DT_NEEDED: found libgomp.so.1; wanted only " in refusal
    assert ": tag: found manylinux_2_17_x86_64; wanted one of none, because of " in refusal


def test_openmp_that_is_left_to_torch(shop: Workshop) -> None:
    source, compiled_object = shop.folder / "spread.c", shop.folder / "spread.o"
    source.write_text(_PARALLEL)
    Shell().run([str(shop.cc), "-c", "-fPIC", "-fopenmp", "-o", str(compiled_object), str(source)])
    compiled = shop.op("", str(compiled_object))
    verify_wheel(shop.finish(compiled), shop.context())


def test_another_machine(shop: Workshop) -> None:
    content = bytearray(shop.op().path.read_bytes())
    struct.pack_into("<H", content, 18, 183)  # e_machine: EM_AARCH64
    refusal = _refused(shop.claim(shop.make(bytes(content))), shop.context())
    assert ": machine: found a file for aarch64, listed as aarch64; wanted x86_64, the machine of x86_64" in refusal
    assert ": tag: found manylinux_2_17_x86_64; wanted a" not in refusal


def test_a_symbol_version_of_a_newer_glibc(shop: Workshop) -> None:
    newer = shop.op().path.read_bytes().replace(b"GLIBC_2.14", b"GLIBC_2.34")
    with pytest.raises(
        GateError, match=r"tag: found manylinux_2_34_x86_64, because of libc\.so\.6 GLIBC_2\.34; wanted "
    ):
        shop.finish(shop.make(newer))


@pytest.mark.parametrize("platform", ["manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64"])
def test_a_false_tag(shop: Workshop, platform: str) -> None:
    path = shop.claim(shop.op(), platform)
    assert f"{path.name}: tag: found {platform}; wanted one of manylinux_2_" in _refused(path, shop.context())


def test_a_byte_that_changed_after_the_seal(shop: Workshop) -> None:
    def flip(contents: dict[str, bytes]) -> None:
        (name,) = (name for name in contents if name.endswith(".so"))
        contents[name] = contents[name][:-1] + bytes([contents[name][-1] ^ 1])

    refusal = _refused(_edit(shop.finish(shop.op()), flip), shop.context())
    assert "/sample_op.cpython-311-x86_64-linux-gnu.so: manifest: found sha256 " in refusal


def test_a_byte_that_changed_after_record_was_written(shop: Workshop) -> None:
    path = shop.finish(shop.op())
    with ZipFile(path) as archive:
        members = [(entry, archive.read(entry)) for entry in archive.infolist()]
    with ZipFile(path, "w") as archive:
        for entry, content in members:
            archive.writestr(entry, content[:-1] + b"!" if entry.filename.endswith(".so") else content)
    refusal = _refused(path, shop.context())
    assert "/sample_op.cpython-311-x86_64-linux-gnu.so: RECORD: found sha256=" in refusal


def test_a_shared_object_too_many(shop: Workshop) -> None:
    def add(contents: dict[str, bytes]) -> None:
        contents["dsops_prebuilt_payloads/cu118/more.so"] = (shop.torch_lib / "libc10.so").read_bytes()

    refusal = _refused(_edit(shop.finish(shop.op()), add), shop.context())
    assert "more.so: manifest: found a shared object that is not listed; wanted every one listed" in refusal


def test_a_shared_object_too_few(shop: Workshop) -> None:
    def drop(contents: dict[str, bytes]) -> None:
        (name,) = (name for name in contents if name.endswith(".so"))
        # auditwheel reads wheels with a shared object only; another one keeps the tag gate out of this test.
        contents["dsops_prebuilt_payloads/cu118/more.so"] = contents.pop(name)

    refusal = _refused(_edit(shop.finish(shop.op()), drop), shop.context())
    assert "linux-gnu.so: manifest: found listed, and not in the wheel; wanted every one there" in refusal


def test_another_build_tag(shop: Workshop) -> None:
    path = shop.finish(shop.op())
    renamed = path.rename(path.with_name(path.name.replace("-1-cp311", "-2-cp311")))
    assert f"{renamed.name}: metadata: found manifest build 1; wanted 2" in _refused(renamed, shop.context())


def test_another_python_tag(shop: Workshop) -> None:
    path = shop.finish(shop.op())
    renamed = path.rename(path.with_name(path.name.replace("cp311", "cp312")))
    assert ": python: found in a wheel for ['cp312-cp312']; wanted cp311-cp311" in _refused(renamed, shop.context())


def test_gpu_code_of_other_architectures(shop: Workshop) -> None:
    path = shop.finish(shop.op(_FATBIN, kernel="cuda"))
    verify_wheel(path, shop.context(archs={"2.7": _ARCHS}))
    refusal = _refused(path, shop.context(archs={"2.7": (GpuArch(8, 0), GpuArch(9, 0), GpuArch(12, 0))}))
    assert (
        "GPU code: found SASS 8.0 9.0, PTX 9.0; wanted SASS 8.0 9.0 12.0, PTX none, as asked for torch 2.7" in refusal
    )


@pytest.mark.parametrize("spare", [0, -1], ids=["at the budget", "over it"])
def test_size(shop: Workshop, spare: int) -> None:
    path = shop.finish(shop.op())
    size = path.stat().st_size
    if spare == 0:
        verify_wheel(path, shop.context(budget=size))
    else:
        assert f"{path.name}: size: found {size} bytes; wanted at most {size - 1}" in _refused(
            path, shop.context(budget=size - 1)
        )


def test_an_archive_with_dates(shop: Workshop) -> None:
    path = shop.finish(shop.op())
    with ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert ": archive: found date_time (2" in _refused(path, shop.context())


@dataclass(frozen=True)
class CoreWorkshop:
    """Takes a portable library through the pipeline of the core wheel."""

    shop: Workshop
    make: PortableSample
    loader: Path

    def contents(self, source: str, *flags: str) -> Contents:
        library = self.shop.build(self.shop.folder / "portable.so", source, *flags)
        return Contents(
            loader=self.loader,
            artifacts=(replace(self.make(), path=library),),
            license_text="DeepSpeed's",
            provenance=(("host_compiler", "gcc-10"),),
        )

    def finish(self, contents: Contents, place: str = "core") -> Path:
        """Pack, repair with the real auditwheel, seal."""
        folder = self.shop.folder / place
        raw = platform_wheel.pack(contents, folder / "raw")
        repaired = repair(raw, into=folder / "repaired", runner=Shell(), environment=_ENVIRONMENT)
        return platform_wheel.seal(repaired, contents, folder / "dist")


@pytest.fixture
def core_shop(shop: Workshop, portable_sample: PortableSample, loader_wheel: Path) -> CoreWorkshop:
    return CoreWorkshop(shop=shop, make=portable_sample, loader=loader_wheel)


def test_a_core_wheel_without_a_fault_twice(core_shop: CoreWorkshop) -> None:
    contents = core_shop.contents(_LIBRARY)
    path, again = core_shop.finish(contents), core_shop.finish(contents, "again")
    assert path.name.startswith("dsops_prebuilt-0.1.0-py3-none-manylinux")
    assert path.name == again.name
    assert path.read_bytes() == again.read_bytes()
    checked = verify_wheel(path, Context(runner=_Cuobjdump()))
    assert checked[1:] == (
        "sample/ds0.19.8/x86_64/sample_op.scalar.so: x86_64, instructions up to x86_64, DT_NEEDED, search paths, symbols",
    )


@pytest.mark.parametrize(
    ("source", "flags", "messages"),
    [
        pytest.param(
            f"{_LIBRARY}void GOMP_parallel(void) {{}}", (), ["exports: found GOMP_parallel; wanted only dsops_abi, "],
            id="exports OpenMP's function",
        ),
        pytest.param(
            _LIBRARY.replace("int dsops_call", "static int dsops_call"), (),
            ["exports: found no dsops_call; wanted it, for the loader calls it"],
            id="no dsops_call",
        ),
        pytest.param(
            f"{_LIBRARY}void *PyErr_Occurred(void); void use(void) {{ PyErr_Occurred(); }}", ("-fvisibility=hidden",),
            ["exports: found no dsops_abi; ", "symbols: found PyErr_Occurred undefined; "],
            id="asks for Python",
        ),
        pytest.param(
            _LIBRARY + _AVX512.replace("void wide", "static __attribute__((used)) void wide"), (),
            ["instructions: found vaddps zmm3,zmm2,zmm1 at "],
            id="AVX-512 in a scalar file",
        ),
        pytest.param(
            _LIBRARY, ("-Wl,-rpath,/opt/lib",), ["search path: found RPATH or RUNPATH /opt/lib; wanted none"], id="RUNPATH"
        ),
    ],
)  # fmt: skip
def test_a_fault_in_a_portable_library(
    core_shop: CoreWorkshop, source: str, flags: tuple[str, ...], messages: list[str]
) -> None:
    path = core_shop.finish(core_shop.contents(source, *flags))
    refusal = _refused(path, Context(runner=_Cuobjdump()))
    for message in messages:
        assert f"/sample_op.scalar.so: {message}" in refusal


def test_a_portable_library_with_an_openmp_runtime_of_its_own(core_shop: CoreWorkshop) -> None:
    with pytest.raises(GateError, match=r"because of .*libgomp\.so\.1, which the tag does not allow"):
        core_shop.finish(core_shop.contents(_LIBRARY + _PARALLEL, "-fopenmp"))


def test_a_portable_library_that_is_bound_to_torch(core_shop: CoreWorkshop) -> None:
    source = f"{_LIBRARY}int c10_sample(int); static __attribute__((used)) int use(void) {{ return c10_sample(1); }}"
    refusal = _refused(core_shop.finish(core_shop.contents(source, "-lc10")), Context(runner=_Cuobjdump()))
    assert "/sample_op.scalar.so: DT_NEEDED: found libc10.so; wanted only ld-linux-aarch64.so.1, " in refusal
    assert "/sample_op.scalar.so: symbols: found c10_sample undefined; wanted " in refusal
