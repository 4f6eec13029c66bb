"""The portable tier with the real compiler: which releases share a file, what makes another one, and the same bytes twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsops_builder.compiler import CompilerHome
from dsops_builder.elf import read_elf
from dsops_builder.errors import CompileError
from dsops_builder.fetch import Sdists
from dsops_builder.gates import check_build_paths
from dsops_builder.model import Matrix, Op
from dsops_builder.ops import load_ops
from dsops_builder.portable import PortableArtifact, PortableCompiler, build_portable
from dsops_builder.portable.build import SHIM, unpack_trees
from dsops_builder.process import Shell
from dsops_prebuilt._manifest import closure_sha256
from dsops_prebuilt._variant import Simd

ROOT = Path(__file__).parents[2]
# cpu_lion: 0.14.4 and 0.19.7 differ in bytes and not in code, 0.19.8 corrects the vector code (csrc/includes/cpu_lion.h).
RELEASES = ("0.14.4", "0.19.7", "0.19.8")
LEVELS = (Simd.X86_64, Simd.X86_64_V3)
_IMPL = "lion/cpu_lion_impl.cpp"


@pytest.fixture(scope="module")
def lion() -> Op:
    return next(op for op in load_ops(ROOT / "ops") if op.id == "cpu_lion")


@pytest.fixture(scope="module")
def trees(matrix: Matrix, cache: Path) -> dict[str, Path]:
    """The csrc folders of the releases."""
    return unpack_trees(Sdists({release: matrix.deepspeed[release] for release in RELEASES}, cache, Shell()), cache)


Make = Callable[..., tuple[PortableArtifact, ...]]


@pytest.fixture(scope="module")
def make(compiler: CompilerHome, lion: Op, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Builds cpu_lion of trees for levels, in a cache for all of these tests, or in one of its own."""
    shared = tmp_path_factory.mktemp("portable")

    def build(trees: dict[str, Path], *levels: Simd, cache: Path = shared) -> tuple[PortableArtifact, ...]:
        portable = PortableCompiler(compiler=compiler, shim=ROOT / "ops" / SHIM, cache=cache, runner=Shell())
        return build_portable([lion], levels, trees, portable, 2)

    return build


@pytest.fixture(scope="module")
def artifacts(make: Make, trees: dict[str, Path]) -> tuple[PortableArtifact, ...]:
    return make(trees, *LEVELS)


Plant = Callable[[str, str, str], dict[str, Path]]


@pytest.fixture
def plant(trees: dict[str, Path], tmp_path: Path) -> Plant:
    """Adds to 0.19.8 a release 0.19.9, in which one text of one file is replaced."""

    def make(name: str, old: str, new: str) -> dict[str, Path]:
        copy = tmp_path / "planted"
        shutil.copytree(trees["0.19.8"], copy)
        text = (copy / name).read_text()
        assert old in text
        (copy / name).write_text(text.replace(old, new, 1))
        return {"0.19.8": trees["0.19.8"], "0.19.9": copy}

    return make


def _releases(artifact: PortableArtifact) -> list[tuple[str, ...]]:
    return [source.deepspeed for source in artifact.sources]


def test_releases_share_a_file_where_their_code_is_the_same(
    artifacts: tuple[PortableArtifact, ...], trees: dict[str, Path]
) -> None:
    assert [(one.file, _releases(one)) for one in artifacts] == [
        ("cpu_lion/ds0.14.4/x86_64/cpu_lion_op.scalar.so", [("0.14.4",), ("0.19.7",), ("0.19.8",)]),
        ("cpu_lion/ds0.14.4/x86_64_v3/cpu_lion_op.avx256.so", [("0.14.4",), ("0.19.7",)]),
        ("cpu_lion/ds0.19.8/x86_64_v3/cpu_lion_op.avx256.so", [("0.19.8",)]),
    ]
    assert len({one.path.read_bytes() for one in artifacts}) == 3
    # The loader computes these digests again from the installed DeepSpeed, so they are of the files as they are there.
    for one in artifacts:
        assert len({source.sha256 for source in one.sources}) == len(one.sources)
        for source in one.sources:
            assert source.closure == (
                "lion/cpu_lion.cpp",
                _IMPL,
                "includes/cpu_lion.h",
                "includes/simd.h",
            )
            assert source.sha256 == closure_sha256(trees[source.deepspeed[0]], source.closure)


def test_nothing_of_torch_or_python_or_openmp_is_needed(artifacts: tuple[PortableArtifact, ...]) -> None:
    for one in artifacts:
        elf = read_elf(one.path)
        assert set(elf.needed) <= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
        assert elf.unversioned == ()
        assert {name for name in elf.defined if not name.startswith("dsops_")} == set()


def test_a_comment_changes_the_digest_and_not_the_file(
    make: Make, plant: Plant, artifacts: tuple[PortableArtifact, ...]
) -> None:
    made = make(plant(_IMPL, "// C++ interface\n", "// C++ interface, and\n// a planted line\n"), *LEVELS)
    assert [_releases(one) for one in made] == [[("0.19.8",), ("0.19.9",)]] * 2
    assert [one.path.read_bytes() for one in made] == [artifacts[index].path.read_bytes() for index in (0, 2)]
    for one in made:
        first, second = one.sources
        assert first.sha256 != second.sha256


def test_arithmetic_makes_a_second_file(make: Make, plant: Plant) -> None:
    planted = plant(_IMPL, "1 - alpha * _weight_decay", "1 + alpha * _weight_decay")
    first, second = make(planted, Simd.X86_64)
    assert (_releases(first), _releases(second)) == ([("0.19.8",)], [("0.19.9",)])
    assert first.path.read_bytes() != second.path.read_bytes()


def test_another_name_of_a_local_variable_is_the_same_file(make: Make, plant: Plant) -> None:
    copysign = "tmp = -std::copysignf(alpha, tmp);"
    (one,) = make(plant(_IMPL, copysign, "float same = -std::copysignf(alpha, tmp); tmp = same;"), Simd.X86_64)
    assert _releases(one) == [("0.19.8",), ("0.19.9",)]


def test_built_twice_it_is_the_same_bytes(
    make: Make, trees: dict[str, Path], artifacts: tuple[PortableArtifact, ...], tmp_path: Path
) -> None:
    # In another cache, from sources in another folder.
    moved = {release: Path(shutil.copytree(tree, tmp_path / "trees" / release)) for release, tree in trees.items()}
    again = make(moved, *LEVELS, cache=tmp_path / "another-cache")
    assert [one.file for one in again] == [one.file for one in artifacts]
    for one, other in zip(artifacts, again, strict=True):
        assert one.path != other.path
        assert one.path.read_bytes() == other.path.read_bytes()
        assert one.sources == other.sources


def test_no_path_of_the_building_machine_is_in_the_bytes(
    artifacts: tuple[PortableArtifact, ...], trees: dict[str, Path], compiler: CompilerHome
) -> None:
    places = (ROOT, *trees.values(), *(tree.resolve() for tree in trees.values()), compiler.gxx.parents[1])
    forbidden = [str(place) for place in (*places, *(one.path.parents[2] for one in artifacts))]
    for one in artifacts:
        assert list(check_build_paths(one.file, one.path.read_bytes(), forbidden)) == []


def test_code_that_asks_for_the_accelerator_is_refused(make: Make, plant: Plant) -> None:
    asks = "#if defined(__ENABLE_CUDA__)\n#include <cuda_runtime_api.h>\n#endif\n"
    with pytest.raises(CompileError) as caught:
        make(plant("includes/simd.h", "#pragma once\n", f"#pragma once\n{asks}"), Simd.X86_64)
    assert str(caught.value) == (
        "cpu_lion of DeepSpeed 0.19.9: includes/simd.h asks for __ENABLE_CUDA__, so its code is not the same on every "
        "accelerator; it cannot be portable as it is"
    )


def test_sources_that_do_not_compile_are_named_with_the_compilers_own_lines(make: Make, plant: Plant) -> None:
    with pytest.raises(CompileError) as caught:
        make(plant(_IMPL, "// C++ interface\n", "#error planted here\n"), Simd.X86_64)
    message = str(caught.value)
    assert message.startswith("portable cpu_lion of DeepSpeed 0.19.9 for x86_64 did not compile\n")
    assert f"{_IMPL}:20:2: error: #error planted here" in message
