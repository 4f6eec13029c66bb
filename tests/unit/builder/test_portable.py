"""Which releases have the same code, and what is compiled for those that differ, with a compiler made of regular
expressions.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.compiler import CompilerHome
from dsops_builder.errors import CommandError, CompileError
from dsops_builder.fetch import Sdists
from dsops_builder.model import Op, SourceTree
from dsops_builder.portable import PortableArtifact, PortableCompiler, build_portable
from dsops_builder.portable.build import unpack_trees
from dsops_builder.portable.model import Expansion, Sources
from dsops_builder.portable.sources import digests, read_sources, same_code
from dsops_prebuilt._manifest import SourceDigest, closure_sha256
from dsops_prebuilt._variant import Simd

_OP = Op(
    id="cpu_sample",
    name="cpu_sample",
    kernel="host",
    accelerators=("cpu", "cuda"),
    build_variable="DS_BUILD_CPU_SAMPLE",
    module="deepspeed.ops.sample.cpu_sample_op",
    portable=("sample/cpu_sample.cpp", "sample/cpu_sample_impl.cpp"),
)
_FILES = {
    "sample/cpu_sample.cpp": '#include "cpu_sample.h"\nint bind();\n',
    "sample/cpu_sample_impl.cpp": '#include "cpu_sample.h"\nint step() { return 1; }\n',
    "includes/cpu_sample.h": '// Steps.\n#include <cassert>\n#include "simd.h"\n',
    "includes/simd.h": "#if defined(__AVX512__)\nint wide;\n#endif\n",
    "includes/other.h": "int other;\n",
}
_LEVELS = (Simd.X86_64, Simd.X86_64_V3)

Trees = Callable[..., dict[str, Path]]


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    """Makes a csrc folder for each release of changes to the sample's files; None leaves a file out."""

    def make(releases: Mapping[str, Mapping[str, str | None]]) -> dict[str, Path]:
        for release, changes in releases.items():
            for name, text in {**_FILES, **changes}.items():
                if text is not None:
                    path = tmp_path / "csrc" / release / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
        return {release: tmp_path / "csrc" / release for release in releases}

    return make


_SOURCE = _FILES["sample/cpu_sample_impl.cpp"]
_COMMENT = {"sample/cpu_sample_impl.cpp": f"// A planted word.\n{_SOURCE}"}
_ARITHMETIC = {"sample/cpu_sample_impl.cpp": _SOURCE.replace("1", "2")}


def test_releases_with_the_same_bytes_are_one_entry_oldest_first(trees: Trees) -> None:
    made = trees(
        {
            "0.19.10": {},
            "0.19.8": {"includes/other.h": "int changed;\n"},
            "0.19.9": _COMMENT,
            "0.14.4": {"includes/simd.h": "#if 0\n#endif\n"},
        }
    )
    assert read_sources(_OP, made) == (
        Sources(op=_OP, releases=("0.14.4",), csrc=made["0.14.4"]),
        Sources(op=_OP, releases=("0.19.8", "0.19.10"), csrc=made["0.19.8"]),
        Sources(op=_OP, releases=("0.19.9",), csrc=made["0.19.9"]),
    )


@pytest.mark.parametrize(
    ("name", "directive"),
    [
        ("includes/deep.h", '#if 0\n  #  include "deep.h"\n#endif\n'),
        ("includes/deep.h", "#include <deep.h>\n"),
        ("sample/near.h", '#include "near.h"\n'),
        ("far/far.h", '#include "../far/far.h"\n'),
    ],
    ids=["behind a macro", "in angle brackets", "beside the source", "in another folder"],
)
def test_a_header_that_could_be_read_counts(trees: Trees, name: str, directive: str) -> None:
    source = {"sample/cpu_sample.cpp": directive}
    made = trees({"0.19.7": {**source, name: "int x;\n"}, "0.19.8": {**source, name: "int y;\n"}})
    assert [one.releases for one in read_sources(_OP, made)] == [("0.19.7",), ("0.19.8",)]


def test_a_release_without_one_of_the_sources(trees: Trees) -> None:
    made = trees({"0.19.8": {"sample/cpu_sample_impl.cpp": None}})
    with pytest.raises(CompileError) as caught:
        read_sources(_OP, made)
    assert str(caught.value) == (
        f"cpu_sample of DeepSpeed 0.19.8: {made['0.19.8']}/sample/cpu_sample_impl.cpp: No such file or directory"
    )


@pytest.mark.parametrize("macro", ["__ENABLE_CUDA__", "__DISABLE_CUDA__", "__ENABLE_CANN__", "__HIP_PLATFORM_AMD__"])
@pytest.mark.parametrize("name", ["sample/cpu_sample_impl.cpp", "includes/simd.h"])
def test_code_that_asks_for_the_accelerator_is_refused(trees: Trees, macro: str, name: str) -> None:
    made = trees({"0.19.7": {}, "0.19.8": {name: f"#if defined({macro})\n#include <cuda.h>\n#endif\n"}})
    with pytest.raises(CompileError) as caught:
        read_sources(_OP, made)
    assert str(caught.value) == (
        f"cpu_sample of DeepSpeed 0.19.8: {name} asks for {macro}, so its code is not the same on every accelerator; "
        "it cannot be portable as it is"
    )


def test_a_header_that_nothing_includes_may_ask_for_the_accelerator(trees: Trees) -> None:
    (one,) = read_sources(_OP, trees({"0.19.8": {"includes/other.h": "#if defined(__ENABLE_CUDA__)\n#endif\n"}}))
    assert one.releases == ("0.19.8",)


def _expansion(release: str, text: str, closure: str = "a", **changes: Any) -> Expansion:
    facts = {
        "sources": Sources(op=_OP, releases=(release,), csrc=Path(release)),
        "simd": Simd.X86_64,
        "macro": "__SCALAR__",
        "sha256": text * 64,
        "closure": ("sample/cpu_sample.cpp",),
        "closure_sha256": closure * 64,
    }
    return Expansion(**{**facts, **changes})


def test_a_group_has_one_text_one_level_one_macro_and_one_op() -> None:
    other = replace(_OP, id="cpu_sample_cpu", accelerators=("cpu",))
    expansions = (
        _expansion("0.14.4", "1"),
        _expansion("0.19.7", "2"),
        _expansion("0.19.8", "1"),
        _expansion("0.19.8", "1", simd=Simd.X86_64_V3),
        _expansion("0.19.8", "1", macro="__AVX256__"),
        _expansion("0.19.8", "1", sources=Sources(op=other, releases=("0.19.8",), csrc=Path())),
    )
    first, *rest = same_code(expansions)
    assert first == (expansions[0], expansions[2])
    assert [len(group) for group in rest] == [1, 1, 1, 1]


def test_digests_of_a_group_are_by_release_and_each_once() -> None:
    closure = ("sample/cpu_sample.cpp",)
    group = (_expansion("0.19.10", "1", "b"), _expansion("0.19.9", "1", "c"), _expansion("0.19.8", "1", "b"))
    assert digests(group) == (
        SourceDigest(sha256="b" * 64, closure=closure, deepspeed=("0.19.8", "0.19.10")),
        SourceDigest(sha256="c" * 64, closure=closure, deepspeed=("0.19.9",)),
    )


class FakeCompiler:
    """Answers g++: expands what it is given, "compiles" it to its words without names, and links by joining.

    A comment, and what a macro leaves out, is no part of the text, and the name of a local variable, ``local_*``, is
    none of the object. ``#error`` fails. ``runs`` are the commands, and ``environments`` what they were run in.
    """

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.environments: list[Mapping[str, str] | None] = []

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> str:
        assert cwd is not None
        assert log is None
        words = list(command)
        self.runs.append(words)
        self.environments.append(env)
        output = Path(words[words.index("-o") + 1])
        if "-shared" in words:
            output.write_text("".join(Path(word).read_text() for word in words if word.endswith(".o")))
            return ""
        source = words[words.index("-o") - 1]
        files, text = self._read(cwd, source)
        if "#error" in text:
            raise CommandError(f"{source}:1:2: error: #error planted")
        text = re.sub(
            r"#if defined\((\w+)\)\n(.*?)#endif",
            lambda found: found[2] if f"-D{found[1]}" in words else "",
            text,
            flags=re.DOTALL,
        )
        march = [word for word in words if word.startswith("-march")]
        text = f"{march} {re.sub(r'//.*|#.*', '', text).split()}\n"
        if "-E" in words:
            output.write_text(text)
            listed = " \\\n ".join([source, *files, "/usr/include/assert.h"])
            Path(words[words.index("-MF") + 1]).write_text(f"cpu_sample.o: {listed}\n")
        else:
            output.write_text(re.sub(r"local_\w+", "local", text))
        return ""

    def _read(self, csrc: Path, source: str) -> tuple[list[str], str]:
        """The headers that were read, and the whole text."""
        text = (csrc / source).read_text()
        files = []
        for name in re.findall(r'#include "(\w+\.h)"', text):
            more, inner = self._read(csrc, f"includes/{name}") if csrc.name != "shim" else ([], "")
            files += [f"includes/{name}", *more]
            text += inner
        return files, text

    def kinds(self) -> list[str]:
        """What each command did: ``-E``, ``-c`` or ``-shared``."""
        return [next(kind for kind in ("-E", "-c", "-shared") if kind in words) for words in self.runs]


@pytest.fixture
def gxx() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def compiler(gxx: FakeCompiler, tmp_path: Path) -> PortableCompiler:
    shim = tmp_path / "shim"
    (shim / "include/torch").mkdir(parents=True)
    for name in ("library.cpp", "openmp.cpp", "exports.map", "include/torch/extension.h"):
        (shim / name).write_text(f"// {name}\n")
    return PortableCompiler(compiler=_home("key"), shim=shim, cache=tmp_path / "cache", runner=gxx)


def _home(key: str) -> CompilerHome:
    return CompilerHome(
        key=key,
        machine="x86_64",
        sysroot=None,
        gcc=Path("/c/bin/gcc"),
        gxx=Path("/c/bin/g++"),
        strip=Path("/c/bin/strip"),
        link_flags=("-L/c/stubs", "-Wl,--as-needed"),
        description="a compiler",
    )


def _build(trees: Mapping[str, Path], compiler: PortableCompiler, *levels: Simd) -> tuple[PortableArtifact, ...]:
    return build_portable([_OP], levels or (Simd.X86_64,), trees, compiler, 2)


def _releases(artifact: PortableArtifact) -> list[tuple[str, ...]]:
    return [source.deepspeed for source in artifact.sources]


def test_an_expansion_has_the_files_that_were_read_and_their_digest(trees: Trees, compiler: PortableCompiler) -> None:
    (sources,) = read_sources(_OP, trees({"0.19.8": {}}))
    found = compiler.expand(sources, Simd.X86_64_V3)
    closure = (*_OP.portable, "includes/cpu_sample.h", "includes/simd.h")
    assert found == Expansion(
        sources=sources,
        simd=Simd.X86_64_V3,
        macro="__AVX256__",
        sha256=found.sha256,
        closure=closure,
        closure_sha256=closure_sha256(sources.csrc, closure),
    )
    assert [path.name for path in (compiler.cache / "expanded").rglob("*") if path.is_file()] == ["expanded.json"]


def test_the_level_and_what_is_kept_inside_are_on_the_command_line(
    trees: Trees, compiler: PortableCompiler, gxx: FakeCompiler
) -> None:
    _build(trees({"0.19.8": {}}), compiler, Simd.X86_64_V4)
    compiled = next(words for words in gxx.runs if "-c" in words and words[-1].endswith("cpu_sample.o"))
    assert compiled[0] == "/c/bin/g++"
    for word in ("-march=x86-64-v4", "-D__AVX512__", "-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=cpu_sample_op"):
        assert word in compiled
    assert f"-ffile-prefix-map={compiler.shim}=." in compiled
    (linked,) = (words for words in gxx.runs if "-shared" in words)
    assert f"-Wl,--version-script={compiler.shim}/exports.map" in linked
    assert "-L/c/stubs" in linked
    # OpenMP is torch's: compiled for, and not linked.
    assert "-fopenmp" in compiled
    assert not {"-fopenmp", "-lgomp"} & set(linked)
    assert {tuple((env or {}).items()) for env in gxx.environments} == {
        (("LANG", "C.UTF-8"), ("PATH", "/usr/bin:/bin"))
    }


def test_a_comment_changes_the_digest_and_not_the_file(
    trees: Trees, compiler: PortableCompiler, gxx: FakeCompiler
) -> None:
    made = trees({"0.19.7": {}, "0.19.8": _COMMENT})
    (artifact,) = _build(made, compiler)
    assert _releases(artifact) == [("0.19.7",), ("0.19.8",)]
    first, second = artifact.sources
    assert first.sha256 != second.sha256
    assert [source.sha256 for source in artifact.sources] == [
        closure_sha256(made[release], first.closure) for release in ("0.19.7", "0.19.8")
    ]
    # Both are expanded, and one is compiled: two sources, two files of the C ABI.
    assert sorted(gxx.kinds()) == ["-E"] * 4 + ["-c"] * 4 + ["-shared"]


def test_arithmetic_makes_a_second_file(trees: Trees, compiler: PortableCompiler) -> None:
    first, second = _build(trees({"0.14.4": {}, "0.19.7": _ARITHMETIC, "0.19.8": {}}), compiler)
    assert (_releases(first), _releases(second)) == ([("0.14.4", "0.19.8")], [("0.19.7",)])
    assert first.path.read_bytes() != second.path.read_bytes()
    assert [one.file for one in (first, second)] == [
        "cpu_sample/ds0.14.4/x86_64/cpu_sample_op.scalar.so",
        "cpu_sample/ds0.19.7/x86_64/cpu_sample_op.scalar.so",
    ]


def test_texts_that_differ_and_compile_to_the_same_bytes_share_a_file(
    trees: Trees, compiler: PortableCompiler, gxx: FakeCompiler
) -> None:
    renamed = {
        release: {"sample/cpu_sample_impl.cpp": f"int step() {{ int local_{name} = 1; return local_{name}; }}\n"}
        for release, name in {"0.19.7": "x", "0.19.8": "y"}.items()
    }
    (artifact,) = _build(trees(renamed), compiler)
    assert _releases(artifact) == [("0.19.7",), ("0.19.8",)]
    assert gxx.kinds().count("-shared") == 2


def test_a_change_of_one_level_only_makes_a_file_of_that_level_only(trees: Trees, compiler: PortableCompiler) -> None:
    # As cpu_lion of 0.19.8: the vector code changed, the scalar code did not.
    wider = {"includes/simd.h": "#if defined(__AVX256__)\nint wider;\n#endif\n"}
    artifacts = _build(trees({"0.19.7": {}, "0.19.8": wider}), compiler, *_LEVELS)
    assert [(one.file, _releases(one)) for one in artifacts] == [
        ("cpu_sample/ds0.19.7/x86_64/cpu_sample_op.scalar.so", [("0.19.7",), ("0.19.8",)]),
        ("cpu_sample/ds0.19.7/x86_64_v3/cpu_sample_op.avx256.so", [("0.19.7",)]),
        ("cpu_sample/ds0.19.8/x86_64_v3/cpu_sample_op.avx256.so", [("0.19.8",)]),
    ]


def test_artifacts_are_by_op_then_release_then_level(trees: Trees, compiler: PortableCompiler) -> None:
    made = trees({"0.19.10": _ARITHMETIC, "0.19.9": {}})
    own = replace(_OP, id="cpu_sample_cpu", accelerators=("cpu",))
    artifacts = build_portable([own, _OP], reversed(_LEVELS), made, compiler, 2)
    assert [one.file for one in artifacts] == [
        f"{op}/ds{release}/{level}/cpu_sample_op.{kernel}.so"
        for op in ("cpu_sample", "cpu_sample_cpu")
        for release in ("0.19.9", "0.19.10")
        for level, kernel in (("x86_64", "scalar"), ("x86_64_v3", "avx256"))
    ]
    assert {(one.op.id, one.op.accelerators) for one in artifacts} == {
        ("cpu_sample", ("cpu", "cuda")),
        ("cpu_sample_cpu", ("cpu",)),
    }


def test_aarch64_is_neon_where_the_sources_know_it(trees: Trees, compiler: PortableCompiler) -> None:
    made = trees({"0.19.6": {}, "0.19.7": {"includes/simd.h": "#if defined(__NEON__)\nint wide;\n#endif\n"}})
    old, new = _build(made, compiler, Simd.AARCH64)
    assert (old.file, new.file) == (
        "cpu_sample/ds0.19.6/aarch64/cpu_sample_op.scalar.so",
        "cpu_sample/ds0.19.7/aarch64/cpu_sample_op.neon.so",
    )


def test_a_second_run_starts_no_compiler(trees: Trees, compiler: PortableCompiler, gxx: FakeCompiler) -> None:
    made = trees({"0.19.7": {}, "0.19.8": _ARITHMETIC})
    first = _build(made, compiler, *_LEVELS)
    gxx.runs.clear()
    assert _build(made, compiler, *_LEVELS) == first
    assert gxx.runs == []


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        pytest.param("compiler", {"-E": 2, "-c": 4, "-shared": 1}, id="compiler"),
        pytest.param("include/torch/extension.h", {"-E": 2, "-c": 4, "-shared": 1}, id="header of the C ABI"),
        pytest.param("exports.map", {"-E": 2, "-c": 4, "-shared": 1}, id="exports"),
    ],
)
def test_what_decides_the_result_makes_it_anew(
    trees: Trees, compiler: PortableCompiler, gxx: FakeCompiler, change: str, kinds: dict[str, int]
) -> None:
    made = trees({"0.19.8": {}})
    _build(made, compiler)
    gxx.runs.clear()
    if change == "compiler":
        compiler = replace(compiler, compiler=_home("another key"))
    else:
        (compiler.shim / change).write_text("// changed\n")
    _build(made, compiler)
    assert {kind: gxx.kinds().count(kind) for kind in kinds} == kinds


def test_a_header_out_of_the_way_makes_it_anew(trees: Trees, compiler: PortableCompiler) -> None:
    source = {"sample/cpu_sample.cpp": '#include "../far/far.h"\n'}
    keys = []
    for release, text in {"0.19.7": "int x;\n", "0.19.8": "int y;\n"}.items():
        (sources,) = read_sources(_OP, trees({release: {**source, "far/far.h": text}}))
        compiler.expand(sources, Simd.X86_64)
        keys.append({path.name for path in (compiler.cache / "expanded").iterdir()})
    assert [len(each) for each in keys] == [1, 2]


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("csrc", "portable cpu_sample of DeepSpeed 0.19.8 for x86_64"),
        ("shim", "the C ABI of the portable tier for x86_64"),
    ],
)
def test_what_does_not_compile_is_named_with_the_compilers_words(
    trees: Trees, compiler: PortableCompiler, place: str, what: str
) -> None:
    broken = {"sample/cpu_sample_impl.cpp": "#error planted\n"} if place == "csrc" else {}
    if place == "shim":
        (compiler.shim / "openmp.cpp").write_text("#error planted\n")
    with pytest.raises(CompileError) as caught:
        _build(trees({"0.19.8": broken}), compiler)
    name = "sample/cpu_sample_impl.cpp" if place == "csrc" else f"{compiler.shim}/openmp.cpp"
    assert str(caught.value) == f"{what} did not compile\n{name}:1:2: error: #error planted"
    left = [path for path in compiler.cache.rglob("*") if path.name.startswith(".")]
    assert left == []


def _sdist(release: str, folder: Path) -> SourceTree:
    """An sdist with what CPU optimizers are made of and what they are not, in ``folder``."""
    path = folder / f"sdist/deepspeed-{release}.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("adam/a.cpp", "adagrad/a.cpp", "lion/a.cpp", "cpu/adam/a.cpp", "includes/a.h", "transformer/a.cu")
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"deepspeed-{release}/csrc/{name}"), io.BytesIO())
    return SourceTree(sdist_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_of_each_release_what_cpu_optimizers_are_made_of_is_unpacked_once(tmp_path: Path, fake_runner: Any) -> None:
    made = {release: _sdist(release, tmp_path) for release in ("0.19.7", "0.19.8")}
    sdists = Sdists(made, tmp_path, fake_runner(lambda _: ""))
    trees = unpack_trees(sdists, tmp_path)
    assert trees == {
        release: tmp_path / "csrc" / f"{release}-{tree.sdist_sha256[:16]}" for release, tree in made.items()
    }
    for home in trees.values():
        found = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
        assert found == ["adagrad/a.cpp", "adam/a.cpp", "cpu/adam/a.cpp", "includes/a.h", "lion/a.cpp"]
    for release in made:
        (tmp_path / f"sdist/deepspeed-{release}.tar.gz").unlink()
    assert unpack_trees(sdists, tmp_path) == trees
