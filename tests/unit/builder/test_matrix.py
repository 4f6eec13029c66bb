"""Every fault of ``build_matrix.yaml`` and ``ops/*/op.yaml``, word for word."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsops_builder.archs import capabilities
from dsops_builder.errors import MatrixError
from dsops_builder.matrix import load_matrix
from dsops_builder.model import Environment
from dsops_builder.ops import load_ops
from dsops_prebuilt._variant import CudaRelease, GpuArch, Simd

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "tests/data/small"
TOP = (
    "schema_version, deepspeed, compiler, cross_compilers, emulator, toolkits, python_headers, tracer, requirements, "
    "portable, rows"
)
CROSS_COMPILERS = (
    'cross_compilers:\n  aarch64:\n    machine: aarch64\n    name: gcc-10\n    version: "10.2.1"\n    glibc: "2.28"\n'
    '    glibcxx: "3.4.24"\n    cxxabi: "1.3.11"\n    sysroot: []\n    libraries: []\n'
)
NVCC_11_8 = "3.5, 3.7, 5.0, 5.2, 5.3, 6.0, 6.1, 6.2, 7.0, 7.2, 7.5, 8.0, 8.6, 8.7, 8.9, 9.0"


@dataclass(frozen=True)
class Copy:
    """A copy of the small matrix, with every path in messages cut to what follows its folder."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "build_matrix.yaml"

    def change(self, *changes: tuple[str, str], file: str = "build_matrix.yaml") -> None:
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new, 1)
        path.write_text(text, encoding="utf-8")

    def faults(self) -> list[str]:
        with pytest.raises(MatrixError) as caught:
            load_matrix(self.file)
        return str(caught.value).replace(f"{self.folder}/", "").splitlines()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    shutil.copytree(SMALL, tmp_path / "small")
    return Copy(tmp_path / "small")


def test_small_matrix_is_what_its_file_says() -> None:
    matrix = load_matrix(SMALL / "build_matrix.yaml")

    assert list(matrix.rows) == ["1_cpu", "1_cu118"]
    row = matrix.rows["1_cu118"]
    assert row.simd == (Simd.X86_64_V3, Simd.X86_64_V4)
    assert row.pairings[1].archs == (GpuArch(8, 0), GpuArch(9, 0, ptx=True))
    assert row.pairings[1].wheels == {"3.11": ("c" * 64,), "3.12": ("ab" * 32,)}
    assert row.excludes[0].reason == "nobody asked for it"
    assert matrix.toolkits["11.8"].packages[0].name == "libcub-dev"
    assert matrix.portable.ops == ("cpu_adam",)
    assert matrix.portable.simd == (Simd.X86_64, Simd.X86_64_V3, Simd.AARCH64)
    assert matrix.portable.smoke == (Environment(python="3.11", torch="2.13.0", deepspeed="0.19.8"),)
    assert {machine: one.machine for machine, one in matrix.cross_compilers.items()} == {"aarch64": "aarch64"}


def test_archs_are_in_order_whatever_the_files(copy: Copy) -> None:
    copy.change(('archs: ["8.0", "9.0+PTX"]', 'archs: ["9.0", "7.5", "8.0+PTX"]'))

    assert [str(arch) for arch in load_matrix(copy.file).rows["1_cu118"].pairings[0].archs] == ["7.5", "8.0+PTX", "9.0"]


def test_real_matrix_and_ops_have_no_fault() -> None:
    matrix = load_matrix(ROOT / "build_matrix.yaml")
    ops = load_ops(ROOT / "ops")

    named = {*matrix.portable.ops, *(name for row in matrix.rows.values() for name in row.ops)}
    assert named == {op.id for op in ops}


ONE_FAULT = {
    # The shape of the file.
    "number for a release": (
        ('- torch: "2.7.1"', "- torch: 2.10"),
        '45: rows.1_cu118.pairings[1].torch: 2.10 is a number; write it quoted, "2.10"',
    ),
    "number for a python": (
        ('pythons: ["3.10", "3.11"]', 'pythons: [3.10, "3.11"]'),
        '42: rows.1_cu118.pairings[0].pythons[0]: 3.10 is a number; write it quoted, "3.10"',
    ),
    "number for an arch": (
        ('archs: ["8.0", "9.0+PTX"]', 'archs: ["8.0", 12.0]'),
        '43: rows.1_cu118.pairings[0].archs[1]: 12.0 is a number; write it quoted, "12.0"',
    ),
    "number for a key": (
        ('  "11.8":\n    provider', "  11.8:\n    provider"),
        '14: toolkits["11.8"]: 11.8 is a number; write it quoted, "11.8"',
    ),
    "number with an underscore": (
        ('toolkit: "11.8"', "toolkit: 1_1"),
        '35: rows.1_cu118.toolkit: 1_1 is a number; write it quoted, "1_1"',
    ),
    "integer for a text": (
        ("name: gcc-10", "name: 10"),
        '6: compiler.name: 10 is a number; write it quoted, "10"',
    ),
    "boolean for a text": (
        ("name: gcc-10", "name: true"),
        '6: compiler.name: true is a boolean; write it quoted, "true"',
    ),
    "date for a text": (
        ("name: gcc-10", "name: 2026-10-20"),
        '6: compiler.name: 2026-10-20 is a date; write it quoted, "2026-10-20"',
    ),
    "nothing for a text": (
        ('toolkit: "11.8"', "toolkit:"),
        "35: rows.1_cu118.toolkit: found nothing, accepted a text",
    ),
    "blank text": (
        ("reason: nobody asked for it", 'reason: " "'),
        '57: rows.1_cu118.excludes[0].reason: found " ", accepted a text',
    ),
    "boolean for 0 or 1": (
        ("cxx11_abi: 0", "cxx11_abi: false"),
        "41: rows.1_cu118.pairings[0].cxx11_abi: found false, accepted 0 or 1",
    ),
    "text for 0 or 1": (
        ("cxx11_abi: 0", 'cxx11_abi: "0"'),
        '41: rows.1_cu118.pairings[0].cxx11_abi: found "0", accepted 0 or 1',
    ),
    "another schema": (
        ("schema_version: 1", "schema_version: 2"),
        "2: schema_version: found 2, accepted 1",
    ),
    "text for a list": (
        ('pythons: ["3.11"]', 'pythons: "3.11"'),
        '32: rows.1_cpu.pairings[0].pythons: found "3.11", accepted a list',
    ),
    "list for a mapping": (
        ("python_headers: {}", "python_headers: []"),
        "20: python_headers: found an empty list, accepted a mapping",
    ),
    "mapping for a list": (
        ("tracer: []", "tracer: {a: b}"),
        "21: tracer: found a mapping, accepted a list",
    ),
    "empty list": (
        ('pythons: ["3.11"]', "pythons: []"),
        "32: rows.1_cpu.pairings[0].pythons: found an empty list, accepted a list with something in it",
    ),
    "missing key": (
        ("tracer: []\n", ""),
        f"2: tracer: is missing; accepted here: {TOP}",
    ),
    "unknown key": (
        ("schema_version: 1", "schema_version: 1\nx: 1"),
        f'3: x: found the unknown key "x", accepted {TOP}',
    ),
    "misspelt key": (
        ("    excludes:", "    exclude:"),
        '53: rows.1_cu118.exclude: found the unknown key "exclude", accepted toolkit, ops, deepspeed, simd, pairings, '
        'excludes, did you mean "excludes"?',
    ),
    "misspelt required key": (
        ("tracer: []", "tracr: []"),
        f'21: tracr: found the unknown key "tracr", accepted {TOP}, did you mean "tracer"?',
    ),
    "misspelt key of a pairing": (
        ("        wheels:\n", "        wheel:\n"),
        '49: rows.1_cu118.pairings[1].wheel: found the unknown key "wheel", accepted torch, cxx11_abi, pythons, archs, '
        'wheels, did you mean "wheels"?',
    ),
    "misspelt provider": (
        ("provider: debian", "provider: debain"),
        '15: toolkits["11.8"].provider: found debain, accepted debian, did you mean "debian"?',
    ),
    "misspelt level": (
        ("simd: [x86_64_v3, x86_64_v4]", "simd: [x86_64_v3, x86-64-v4]"),
        "28: rows.1_cpu.simd[1]: found x86-64-v4, accepted x86_64, x86_64_v3, x86_64_v4, aarch64, did you mean "
        '"x86_64_v4"?',
    ),
    "short release": (
        ('- torch: "2.7.1"', '- torch: "2.7"'),
        '45: rows.1_cu118.pairings[1].torch: found "2.7", accepted a release of three numbers, such as "2.7.1"',
    ),
    "local version": (
        ('- torch: "2.7.1"', '- torch: "2.7.1+cu118"'),
        '45: rows.1_cu118.pairings[1].torch: found "2.7.1+cu118", accepted a release of three numbers, such as "2.7.1"',
    ),
    "python with a patch": (
        ('pythons: ["3.11"]', "pythons: [3.11.2]"),
        '32: rows.1_cpu.pairings[0].pythons[0]: found 3.11.2, accepted a Python of two numbers, such as "3.11"',
    ),
    "bad sha256": (
        ("{sdist_sha256: aaaa", "{sdist_sha256: AAAA"),
        f'4: deepspeed["0.19.8"].sdist_sha256: found AAAA{"a" * 60}, accepted a sha256 of 64 lower-case hexadecimal digits',
    ),
    "bad row id": (
        ("  1_cpu:", "  0_cpu:"),
        '25: rows.0_cpu: found the key "0_cpu", accepted BUILD_LABEL, such as 1_cpu or 1_cu118',
    ),
    "unpinned requirement": (
        ("numpy==2.4.6", "numpy>=2.4.6"),
        "23: requirements[0]: found numpy>=2.4.6, accepted NAME==VERSION",
    ),
    "path out of the pool": (
        ("path: pool/main", "path: ../pool/main"),
        '18: toolkits["11.8"].packages[0].path: found ../pool/main/c/cub/libcub-dev_1.17.2-2_all.deb, accepted '
        "pool/.../NAME_VERSION_ARCH.deb",
    ),
    "second key": (
        ("tracer: []", "tracer: []\ntracer: []"),
        "22: tracer: a second time; the first is on line 21",
    ),
    "alias": (
        ("  sysroot: []\n  libraries: []", "  sysroot: &x []\n  libraries: *x"),
        "12: compiler.libraries: an alias (*name); write the value out",
    ),
    "tag": (
        ("tracer: []", "tracer: !set []"),
        "21: tracer: found the tag !set, accepted a value without a tag",
    ),
    "list as a key": (
        ("python_headers: {}", "python_headers: {[a]: b}"),
        "20: python_headers: found a list as a key, accepted a word",
    ),
    "long value": (
        ("numpy==2.4.6", "n" * 100),
        f"23: requirements[0]: found {'n' * 72}..., accepted NAME==VERSION",
    ),
    # One part of the file against another.
    "unknown op": (
        ("ops: [cpu_adam, fused_adam]", "ops: [cpu_adm, fused_adam]"),
        '36: rows.1_cu118.ops[0]: found cpu_adm, accepted cpu_adam, fused_adam, did you mean "cpu_adam"?',
    ),
    "unknown release": (
        ('deepspeed: ["0.19.8"]', 'deepspeed: ["0.19.7"]'),
        '27: rows.1_cpu.deepspeed[0]: found "0.19.7", accepted 0.19.8 of `deepspeed`, did you mean "0.19.8"?',
    ),
    "unknown toolkit": (
        ('toolkit: "11.8"', 'toolkit: "11.7"'),
        '35: rows.1_cu118.toolkit: found "11.7", accepted 11.8 of `toolkits`, did you mean "11.8"?',
    ),
    "toolkit of another label": (
        ("  1_cu118:", "  1_cu126:"),
        '35: rows.1_cu126.toolkit: found "11.8", accepted "12.6", the CUDA release of the label cu126',
    ),
    "toolkit in a cpu row": (
        ("  1_cpu:", '  1_cpu:\n    toolkit: "11.8"'),
        '26: rows.1_cpu.toolkit: found "11.8", accepted no toolkit in a cpu row',
    ),
    "CUDA op without a toolkit": (
        ('    toolkit: "11.8"\n', ""),
        '34: rows.1_cu118.toolkit: is missing; a row with a CUDA op needs it: toolkit: "11.8"',
    ),
    "toolkit with another release": (
        ('release: "11.8.89"', 'release: "12.8.89"'),
        '16: toolkits["11.8"].release: found "12.8.89", accepted a release of 11.8, such as "11.8.1"',
    ),
    "same op twice": (
        ("ops: [cpu_adam, fused_adam]", "ops: [cpu_adam, fused_adam, cpu_adam]"),
        "36: rows.1_cu118.ops[2]: found cpu_adam, accepted each entry once; item 0 is the same",
    ),
    "same python twice": (
        ('pythons: ["3.10", "3.11"]', 'pythons: ["3.10", "3.11", "3.11"]'),
        '42: rows.1_cu118.pairings[0].pythons[2]: found "3.11", accepted each entry once; item 1 is the same',
    ),
    "same torch twice": (
        ('- torch: "2.7.1"', '- torch: "2.6.0"'),
        '45: rows.1_cu118.pairings[1].torch: found "2.6.0", accepted each minor release of torch once, for a file binds to that; pairings[0] is "2.6.0"',
    ),
    "no levels for a host op": (
        (
            '    simd: [x86_64_v3, x86_64_v4]\n    pairings:\n      - torch: "2.13.0"',
            '    pairings:\n      - torch: "2.13.0"',
        ),
        "25: rows.1_cpu.simd: is missing; a row with a host op needs SIMD levels: x86_64, x86_64_v3, x86_64_v4",
    ),
    "levels without a host op": (
        ("ops: [cpu_adam, fused_adam]", "ops: [fused_adam]"),
        "38: rows.1_cu118.simd: found SIMD levels, accepted none in a row whose ops are all CUDA ops",
    ),
    "level that the compiler does not make": (
        ("simd: [x86_64_v3, x86_64_v4]", "simd: [x86_64_v3, aarch64]"),
        "28: rows.1_cpu.simd[1]: found aarch64, accepted x86_64, x86_64_v3, x86_64_v4, the levels that the compiler makes",
    ),
    "two releases of one minor": (
        ('- torch: "2.7.1"', '- torch: "2.6.1"'),
        '45: rows.1_cu118.pairings[1].torch: found "2.6.1", accepted each minor release of torch once, for a file binds '
        'to that; pairings[0] is "2.6.0"',
    ),
    "same requirement twice": (
        ("  - numpy==2.4.6", "  - numpy==2.4.6\n  - msgpack==1.2.4\n  - NumPy==2.4.5"),
        "25: requirements[2]: found NumPy==2.4.5, accepted each package once; item 0 is numpy==2.4.6",
    ),
    "newer glibc": (
        ('glibc: "2.28"', 'glibc: "2.31"'),
        '8: compiler.glibc: found "2.31", accepted 2.28 or older: manylinux_2_28 allows nothing newer',
    ),
    "newer libstdc++": (
        ('glibcxx: "3.4.24"', 'glibcxx: "3.4.28"'),
        '9: compiler.glibcxx: found "3.4.28", accepted 3.4.24 or older: manylinux_2_28 allows nothing newer',
    ),
    "newer C++ ABI": (
        ('cxxabi: "1.3.11"', 'cxxabi: "1.3.12"'),
        '10: compiler.cxxabi: found "1.3.12", accepted 1.3.11 or older: manylinux_2_28 allows nothing newer',
    ),
    "no wheel of a python": (
        (f'          "3.12": [{"ab" * 32}]\n', ""),
        '49: rows.1_cu118.pairings[1].wheels["3.12"]: is missing: the sha256 of the torch wheel for it; `pip download '
        "--no-deps --only-binary :all: --python-version 3.12 torch==2.7.1` fetches the wheel, `sha256sum torch-*.whl` "
        "prints it",
    ),
    "no wheel in the list": (
        (f'"3.12": [{"ab" * 32}]', '"3.12": []'),
        '52: rows.1_cu118.pairings[1].wheels["3.12"]: is missing: the sha256 of the torch wheel for it; `pip download '
        "--no-deps --only-binary :all: --python-version 3.12 torch==2.7.1` fetches the wheel, `sha256sum torch-*.whl` "
        "prints it",
    ),
    "tilde for a text": (
        ('toolkit: "11.8"', "toolkit: ~"),
        "35: rows.1_cu118.toolkit: found nothing, accepted a text",
    ),
    "nothing for a key": (
        ("tracer: []", "tracer: []\n~: []"),
        "22: found nothing as a key, accepted a word",
    ),
    "number for a row": (
        ("  1_cpu:", "  7:"),
        '25: rows.7: found the key "7", accepted BUILD_LABEL, such as 1_cpu or 1_cu118',
    ),
    "hundreds of digits": (
        ("schema_version: 1", f"schema_version: {'1' * 5000}"),
        f"2: schema_version: found {'1' * 72}..., accepted 1",
    ),
    "wheels of a python that is not built": (
        ('          "3.11":', '          "3.13":'),
        '50: rows.1_cu118.pairings[1].wheels["3.13"]: found the key "3.13", accepted 3.11, 3.12 of `pythons`, did you '
        'mean "3.12"?',
    ),
    "exclude of a torch that is not there": (
        ('      - torch: "2.6.0"\n        python', '      - torch: "2.5.0"\n        python'),
        '54: rows.1_cu118.excludes[0].torch: found "2.5.0", accepted one that the row has: 2.6.0, 2.7.1, did you mean '
        '"2.6.0"?',
    ),
    "exclude of an op that is not there": (
        ("op: fused_adam", "op: fused_lamb"),
        "56: rows.1_cu118.excludes[0].op: found fused_lamb, accepted one that the row has: cpu_adam, fused_adam, did "
        'you mean "fused_adam"?',
    ),
    "exclude that matches nothing": (
        ('        python: "3.10"\n', '        python: "3.12"\n'),
        "54: rows.1_cu118.excludes[0]: matches nothing: the row has no 2.6.0 with 3.12 with fused_adam",
    ),
    "no archs for a CUDA op": (
        ('        archs: ["8.0", "9.0+PTX"]\n        wheels: {', "        wheels: {"),
        '40: rows.1_cu118.pairings[0].archs: is missing; a row with a CUDA op needs it, such as ["8.0", "9.0+PTX"]',
    ),
    "archs in a cpu row": (
        ('pythons: ["3.11"]', 'pythons: ["3.11"]\n        archs: ["8.0"]'),
        "33: rows.1_cpu.pairings[0].archs: found GPU architectures, accepted none in a cpu row",
    ),
    "one capability twice": (
        ('archs: ["8.0", "9.0+PTX"]', 'archs: ["9.0", "9.0+PTX"]'),
        '43: rows.1_cu118.pairings[0].archs[1]: found "9.0+PTX", accepted each compute capability once; item 0 is the '
        "same",
    ),
    "capability that no GPU has": (
        ('archs: ["8.0", "9.0+PTX"]', 'archs: ["8.1", "9.0+PTX"]'),
        f'43: rows.1_cu118.pairings[0].archs[0]: found "8.1", accepted a capability that nvcc knows: '
        f'{", ".join(capabilities())}, did you mean "8.9"?',
    ),
    "capability newer than the toolkit": (
        ('archs: ["8.0", "9.0+PTX"]', 'archs: ["8.0", "12.0+PTX"]'),
        f'43: rows.1_cu118.pairings[0].archs[1]: found "12.0+PTX", accepted what nvcc 11.8 compiles: {NVCC_11_8}',
    ),
    "suffix newer than the toolkit": (
        ('archs: ["8.0", "9.0+PTX"]', 'archs: ["8.0", "9.0a"]'),
        f'43: rows.1_cu118.pairings[0].archs[1]: found "9.0a", accepted what nvcc 11.8 compiles: {NVCC_11_8}, did you '
        'mean "9.0"?',
    ),
    # The other compilers and the portable tier.
    "compiler under another machine": (
        ("    machine: aarch64", "    machine: x86_64"),
        "58: cross_compilers: found a mapping, accepted compilers whose machine is their key",
    ),
    "cross compiler in the place of the first": (
        ("compiler:\n", "compiler:\n  machine: aarch64\n"),
        "5: compiler: found a mapping, accepted a compiler for x86_64; others are for cross_compilers",
    ),
    "newer glibc of another machine": (
        ('"10.2.1"\n    glibc: "2.28"', '"10.2.1"\n    glibc: "2.31"'),
        '63: cross_compilers.aarch64.glibc: found "2.31", accepted 2.28 or older: manylinux_2_28 allows nothing newer',
    ),
    "no emulator": (
        ("emulator:\n  path: pool/main/q/qemu/qemu-user-static_7.2-1_amd64.deb\n  sha256: " + "ef" * 32 + "\n", ""),
        f"2: emulator: is missing; accepted here: {TOP}",
    ),
    "no portable op": (
        ("ops: [cpu_adam]\n  simd", "ops: []\n  simd"),
        "72: portable.ops: found an empty list, accepted a list with something in it",
    ),
    "no portable level": (
        ("simd: [x86_64, x86_64_v3, aarch64]", "simd: []"),
        "73: portable.simd: found an empty list, accepted a list with something in it",
    ),
    "portable op that is misspelt": (
        ("ops: [cpu_adam]\n  simd", "ops: [cpu_adm]\n  simd"),
        '72: portable.ops[0]: found cpu_adm, accepted an op with portable sources: cpu_adam, did you mean "cpu_adam"?',
    ),
    "portable op without portable sources": (
        ("ops: [cpu_adam]\n  simd", "ops: [cpu_adam, fused_adam]\n  simd"),
        "72: portable.ops[1]: found fused_adam, accepted an op with portable sources: cpu_adam",
    ),
    "same portable op twice": (
        ("ops: [cpu_adam]\n  simd", "ops: [cpu_adam, cpu_adam]\n  simd"),
        "72: portable.ops[1]: found cpu_adam, accepted each entry once; item 0 is the same",
    ),
    "same portable level twice": (
        ("simd: [x86_64, x86_64_v3, aarch64]", "simd: [x86_64, aarch64, x86_64]"),
        "73: portable.simd[2]: found x86_64, accepted each entry once; item 0 is the same",
    ),
    "portable level that is misspelt": (
        ("simd: [x86_64, x86_64_v3, aarch64]", "simd: [x86_64, x86_64_v2]"),
        "73: portable.simd[1]: found x86_64_v2, accepted x86_64, x86_64_v3, x86_64_v4, aarch64, did you mean "
        '"x86_64_v4"?',
    ),
    "portable level that no compiler is for": (
        (CROSS_COMPILERS, ""),
        "63: portable.simd[2]: found aarch64, accepted a level that a compiler is for (x86_64, x86_64_v3, x86_64_v4); "
        "`cross_compilers` has none for this machine",
    ),
    "portable environment with an unknown release": (
        ('deepspeed: "0.19.8"}', 'deepspeed: "0.19.7"}'),
        '75: portable.smoke[0].deepspeed: found "0.19.7", accepted 0.19.8 of `deepspeed`, did you mean "0.19.8"?',
    ),
}


@pytest.mark.parametrize(("change", "line"), ONE_FAULT.values(), ids=ONE_FAULT)
def test_one_fault_is_one_line(copy: Copy, change: tuple[str, str], line: str) -> None:
    copy.change(change)

    assert copy.faults() == [f"build_matrix.yaml:{line}"]


def test_a_compiler_for_an_unknown_machine_leaves_its_levels_without_one(copy: Copy) -> None:
    copy.change(("  aarch64:", "  riscv64:"))

    assert copy.faults() == [
        'build_matrix.yaml:59: cross_compilers.riscv64: found the key "riscv64", accepted aarch64',
        "build_matrix.yaml:73: portable.simd[2]: found aarch64, accepted a level that a compiler is for (x86_64, "
        "x86_64_v3, x86_64_v4); `cross_compilers` has none for this machine",
    ]


def test_all_faults_come_at_once_in_the_order_of_their_lines(copy: Copy) -> None:
    copy.change(
        ('release: "11.8.89"', "release: 11.8"),
        ("ops: [cpu_adam, fused_adam]", "ops: [cpu_adm, fused_adam]"),
        ('archs: ["8.0", "9.0+PTX"]', 'archs: [8.0, "9.0+PTX", 9.0x]'),
        ('- torch: "2.7.1"', "- torch: 2.7"),
        ("op: fused_adam", "op: fused_lamb"),
        ("tracer: []", "trace: []"),
    )

    assert copy.faults() == [
        'build_matrix.yaml:16: toolkits["11.8"].release: 11.8 is a number; write it quoted, "11.8"',
        f'build_matrix.yaml:21: trace: found the unknown key "trace", accepted {TOP}, did you mean "tracer"?',
        'build_matrix.yaml:36: rows.1_cu118.ops[0]: found cpu_adm, accepted cpu_adam, fused_adam, did you mean "cpu_adam"?',
        'build_matrix.yaml:43: rows.1_cu118.pairings[0].archs[0]: 8.0 is a number; write it quoted, "8.0"',
        "build_matrix.yaml:43: rows.1_cu118.pairings[0].archs[2]: found 9.0x, accepted a compute capability such as "
        '"8.0", "9.0a", "10.0f" or "12.0+PTX"',
        'build_matrix.yaml:45: rows.1_cu118.pairings[1].torch: 2.7 is a number; write it quoted, "2.7"',
        "build_matrix.yaml:56: rows.1_cu118.excludes[0].op: found fused_lamb, accepted one that the row has: cpu_adm, "
        'fused_adam, did you mean "fused_adam"?',
    ]


def test_cuda_op_in_a_cpu_row_is_told_with_what_else_is_wrong_there(copy: Copy) -> None:
    copy.change(("ops: [cpu_adam]", "ops: [cpu_adam, fused_adam]"))

    assert copy.faults() == [
        "build_matrix.yaml:26: rows.1_cpu.ops[1]: found fused_adam, accepted an op for the cpu accelerator (cpu_adam); "
        "this one is for cuda",
        'build_matrix.yaml:30: rows.1_cpu.pairings[0].archs: is missing; a row with a CUDA op needs it, such as ["8.0", "9.0+PTX"]',
    ]


WHOLE_FILE = {
    "empty": (b"", "build_matrix.yaml:1: found nothing, accepted a mapping of keys to values"),
    "only a comment": (b"# soon\n", "build_matrix.yaml:1: found nothing, accepted a mapping of keys to values"),
    "list": (b"- 1\n", "build_matrix.yaml:1: found a list, accepted a mapping of keys to values"),
    "word": (b"rows\n", "build_matrix.yaml:1: found text, accepted a mapping of keys to values"),
    "syntax": (
        b"rows:\n  1_cpu: [a\n",
        "build_matrix.yaml:3: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
    ),
    "tab": (
        b"rows:\n\t1_cpu: a\n",
        "build_matrix.yaml:2: not YAML: while scanning for the next token, found character '\\t' that cannot start any "
        "token",
    ),
    "two documents": (
        b"rows: 1\n---\nrows: 2\n",
        "build_matrix.yaml:2: not YAML: expected a single document in the stream, but found another document",
    ),
    "nested": (b"rows: " + b"[" * 3000, "build_matrix.yaml: is nested too deeply to be read"),
    "escape of no character": (
        b'rows: "\\U00110000"\n',
        "build_matrix.yaml: not YAML: chr() arg not in range(0x110000)",
    ),
    "not UTF-8": (b"rows: \xff\n", "build_matrix.yaml: is not UTF-8 text: invalid start byte"),
    "control character": (
        b"rows: \x00\n",
        "build_matrix.yaml: not YAML: unacceptable character #x0000: special characters are not allowed",
    ),
}


@pytest.mark.parametrize(("content", "line"), WHOLE_FILE.values(), ids=WHOLE_FILE)
def test_file_that_is_no_matrix(copy: Copy, content: bytes, line: str) -> None:
    copy.file.write_bytes(content)

    assert copy.faults() == [line]


def test_a_python_that_is_excluded_needs_no_wheel(copy: Copy) -> None:
    copy.change((f'"3.10": [{"e" * 64}], ', ""), ("        op: fused_adam\n", ""))

    load_matrix(copy.file)


def test_archs_in_a_row_without_a_cuda_op(copy: Copy) -> None:
    copy.change(("ops: [cpu_adam, fused_adam]", "ops: [cpu_adam]"), ("op: fused_adam", "op: cpu_adam"))

    assert copy.faults() == [
        "build_matrix.yaml:43: rows.1_cu118.pairings[0].archs: found GPU architectures, accepted none in a row without a CUDA op",
        "build_matrix.yaml:48: rows.1_cu118.pairings[1].archs: found GPU architectures, accepted none in a row without a CUDA op",
    ]


def test_toolkit_whose_key_is_no_release_is_told_once_and_archs_are_left_alone(copy: Copy) -> None:
    copy.change(('  "11.8":\n    provider', "  eleven:\n    provider"), ('toolkit: "11.8"', "toolkit: eleven"))

    assert copy.faults() == [
        'build_matrix.yaml:14: toolkits.eleven: found the key "eleven", accepted two numbers, such as "11.8"',
        'build_matrix.yaml:35: rows.1_cu118.toolkit: found eleven, accepted "11.8", the CUDA release of the label cu118',
    ]


def test_file_that_is_not_there(copy: Copy) -> None:
    copy.file.unlink()

    assert copy.faults() == ["build_matrix.yaml: cannot be read: No such file or directory"]


def test_folder_instead_of_the_file(copy: Copy) -> None:
    copy.file.unlink()
    copy.file.mkdir()

    assert copy.faults() == ["build_matrix.yaml: cannot be read: Is a directory"]


OP_FAULT = {
    "misspelt kernel": (
        ("kernel: host", "kernel: hots"),
        'ops/cpu_adam/op.yaml:3: kernel: found hots, accepted host or cuda, did you mean "host"?',
    ),
    "name of another folder": (
        ("name: cpu_adam", "name: cpu_adagrad"),
        'ops/cpu_adam/op.yaml:2: name: found cpu_adagrad, accepted "cpu_adam", the name of its folder, or that '
        "without the accelerator",
    ),
    "unknown accelerator": (
        ("accelerators: [cpu, cuda]", "accelerators: [cpu, cud]"),
        'ops/cpu_adam/op.yaml:4: accelerators[1]: found cud, accepted cpu or cuda, did you mean "cuda"?',
    ),
    "variable of something else": (
        ("DS_BUILD_CPU_ADAM", "BUILD_CPU_ADAM"),
        "ops/cpu_adam/op.yaml:5: build_variable: found BUILD_CPU_ADAM, accepted DS_BUILD_NAME, the builder's BUILD_VAR",
    ),
    "module without a package": (
        ("deepspeed.ops.adam.cpu_adam_op", "cpu_adam_op"),
        "ops/cpu_adam/op.yaml:6: module: found cpu_adam_op, accepted a dotted module name, such as "
        "deepspeed.ops.adam.cpu_adam_op",
    ),
    "misspelt key": (
        ("module:", "modul:"),
        'ops/cpu_adam/op.yaml:6: modul: found the unknown key "modul", accepted name, kernel, accelerators, '
        'build_variable, module, portable, did you mean "module"?',
    ),
    "portable source outside csrc": (
        ("[adam/cpu_adam.cpp,", "[../adam/cpu_adam.cpp,"),
        "ops/cpu_adam/op.yaml:7: portable[0]: found ../adam/cpu_adam.cpp, accepted a source below csrc, such as "
        "adam/cpu_adam.cpp",
    ),
    "portable source that is CUDA": (
        ("adam/cpu_adam_impl.cpp]", "adam/multi_tensor_adam.cu]"),
        "ops/cpu_adam/op.yaml:7: portable[1]: found adam/multi_tensor_adam.cu, accepted a source below csrc, such as "
        "adam/cpu_adam.cpp",
    ),
}


@pytest.mark.parametrize(("change", "line"), OP_FAULT.values(), ids=OP_FAULT)
def test_fault_of_a_descriptor_is_told_by_both_readers(copy: Copy, change: tuple[str, str], line: str) -> None:
    copy.change(change, file="ops/cpu_adam/op.yaml")

    assert copy.faults() == [line]
    with pytest.raises(MatrixError, match=r"op\.yaml"):
        load_ops(copy.folder / "ops")


def test_faults_of_the_matrix_and_of_descriptors_come_together(copy: Copy) -> None:
    copy.change(("tracer: []", "tracer: {}"))
    copy.change(("kernel: host", "kernel: hots"), file="ops/cpu_adam/op.yaml")
    (copy.folder / "ops/fused_adam/op.yaml").unlink()

    assert copy.faults() == [
        "build_matrix.yaml:21: tracer: found a mapping, accepted a list",
        'ops/cpu_adam/op.yaml:3: kernel: found hots, accepted host or cuda, did you mean "host"?',
        "ops/fused_adam/op.yaml: cannot be read: No such file or directory",
    ]


def test_ops_folder_without_an_op_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(MatrixError) as missing:
        load_ops(tmp_path / "ops")
    (tmp_path / "ops").mkdir()
    with pytest.raises(MatrixError) as empty:
        load_ops(tmp_path / "ops")

    assert str(missing.value) == f"{tmp_path}/ops: cannot be read: No such file or directory"
    assert str(empty.value) == f"{tmp_path}/ops: has no op; accepted: NAME/op.yaml"


def test_an_accelerators_own_kernel_of_a_name_has_a_folder_of_its_own(copy: Copy) -> None:
    folder = copy.folder / "ops/fused_adam_cpu"
    shutil.copytree(copy.folder / "ops/fused_adam", folder)
    copy.change(
        ("accelerators: [cuda]", "accelerators: [cpu]"),
        ("kernel: cuda", "kernel: host"),
        file="ops/fused_adam_cpu/op.yaml",
    )
    copy.change(("ops: [cpu_adam]", "ops: [cpu_adam, fused_adam_cpu]"))

    assert [(op.id, op.name, op.accelerators) for op in load_ops(copy.folder / "ops")] == [
        ("cpu_adam", "cpu_adam", ("cpu", "cuda")),
        ("fused_adam", "fused_adam", ("cuda",)),
        ("fused_adam_cpu", "fused_adam", ("cpu",)),
    ]
    assert load_matrix(copy.file).rows["1_cpu"].ops == ("cpu_adam", "fused_adam_cpu")


def test_an_op_for_another_accelerator_than_its_folders(copy: Copy) -> None:
    (copy.folder / "ops/fused_adam").rename(copy.folder / "ops/fused_adam_cpu")
    with pytest.raises(MatrixError) as caught:
        load_ops(copy.folder / "ops")

    assert str(caught.value).replace(f"{copy.folder}/", "") == (
        'ops/fused_adam_cpu/op.yaml:3: name: found fused_adam, accepted "fused_adam_cpu", the name of its folder, or '
        "that without the accelerator"
    )


def test_a_folder_of_code_that_ops_share_is_no_op(copy: Copy) -> None:
    (copy.folder / "ops/_portable").mkdir()

    assert [op.id for op in load_ops(copy.folder / "ops")] == ["cpu_adam", "fused_adam"]


def test_what_an_op_of_the_portable_tier_is_made_of() -> None:
    ops = {op.id: op.portable for op in load_ops(SMALL / "ops")}

    assert ops == {"cpu_adam": ("adam/cpu_adam.cpp", "adam/cpu_adam_impl.cpp"), "fused_adam": ()}


def test_ops_are_sorted_by_name() -> None:
    assert [op.name for op in load_ops(SMALL / "ops")] == ["cpu_adam", "fused_adam"]
    assert load_ops(SMALL / "ops")[1].accelerators == ("cuda",)


@pytest.mark.parametrize("text", ["8.0", "9.0a", "10.0f", "12.0+PTX", "10.3a+PTX", "12.1f"])
def test_arch_tokens_that_a_row_may_have(copy: Copy, text: str) -> None:
    copy.change(
        ('"11.8":\n    provider', '"13.0":\n    provider'),
        ('release: "11.8.89"', 'release: "13.0.1"'),
        ("  1_cu118:", "  1_cu130:"),
        ('toolkit: "11.8"', 'toolkit: "13.0"'),
        ('archs: ["8.0", "9.0+PTX"]', f'archs: ["{text}"]'),
    )

    assert [str(arch) for arch in load_matrix(copy.file).rows["1_cu130"].pairings[0].archs] == [text]


@pytest.mark.parametrize(
    "text", ["", "8", "80", "sm_80", "8.0+ptx", "8.0b", "08.0", "8.00", "100.0", "8.0 ", "8.0;9.0"]
)
def test_arch_tokens_that_are_nonsense(copy: Copy, text: str) -> None:
    copy.change(('archs: ["8.0", "9.0+PTX"]', f'archs: ["{text}"]'))

    assert copy.faults() == [
        f'build_matrix.yaml:43: rows.1_cu118.pairings[0].archs[0]: found "{text}", accepted a compute capability such as '
        '"8.0", "9.0a", "10.0f" or "12.0+PTX"'
    ]


def test_what_nvcc_compiles_by_release() -> None:
    """As ``nvcc --list-gpu-code`` of 11.8, 12.4 and 13.0 prints it (without the suffixes, which it does not list)."""
    plain = {
        release: [name for name in capabilities(CudaRelease.parse(release)) if not name[-1].isalpha()]
        for release in ("11.8", "12.4", "13.0")
    }

    assert ", ".join(plain["11.8"]) == NVCC_11_8
    assert plain["12.4"] == [name for name in plain["11.8"] if not name.startswith("3.")]
    assert ", ".join(plain["13.0"]) == "7.5, 8.0, 8.6, 8.7, 8.8, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1"
    assert "9.0a" not in capabilities(CudaRelease(11, 8))
    assert "9.0a" in capabilities(CudaRelease(12, 4))
    assert "10.0f" not in capabilities(CudaRelease(12, 8))
