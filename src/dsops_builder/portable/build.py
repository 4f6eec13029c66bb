"""Compile the portable tier: preprocess every release's sources, then compile each different text once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from packaging.version import Version

from dsops_builder import flags
from dsops_builder.cache import cache_key, fresh_folder
from dsops_builder.compiler import CompilerHome
from dsops_builder.errors import CommandError, CompileError
from dsops_builder.fetch import Sdists
from dsops_builder.model import Op
from dsops_builder.portable import recipe
from dsops_builder.portable.model import Expansion, PortableArtifact, Sources
from dsops_builder.portable.sources import digests, reachable, read_sources, same_code
from dsops_builder.process import Runner
from dsops_prebuilt._manifest import closure_sha256
from dsops_prebuilt._variant import Simd

SHIM = "_portable"
"""The folder of ``ops`` with the C ABI that stands in for torch and pybind11."""
_KEPT = ("adam", "adagrad", "lion", "cpu", "includes")
_RESULT = "expanded.json"
_RECIPE = (recipe.__file__, flags.__file__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class PortableCompiler:
    """Compiles for one machine. ``shim`` is ``ops/_portable``; results lie in the cache by what decided them."""

    compiler: CompilerHome
    shim: Path
    cache: Path
    runner: Runner

    def expand(self, sources: Sources, simd: Simd) -> Expansion:
        """Preprocess the sources for a SIMD level. Raises :class:`CompileError`."""
        macro = flags.portable_macro(simd, (path.read_text(encoding="utf-8") for path in self._texts(sources)))
        key = cache_key(
            [*self._inputs(sources.op, simd, macro), *(self._content(path) for path in self._texts(sources))],
            recipe=_RECIPE,
        )
        home = self.cache / "expanded" / key
        if not home.exists():
            with fresh_folder(home) as scratch:
                self._expand(sources, simd, macro, scratch)
        kept = json.loads((home / _RESULT).read_text(encoding="utf-8"))
        closure = tuple(kept["closure"])
        return Expansion(
            sources=sources,
            simd=simd,
            macro=macro,
            sha256=kept["sha256"],
            closure=closure,
            closure_sha256=closure_sha256(sources.csrc, closure),
        )

    def compile(self, group: Sequence[Expansion]) -> Path:
        """The shared library of a group of equal expansions. Raises :class:`CompileError` with the compiler's words."""
        first = group[0]
        op = first.sources.op
        key = cache_key([*self._inputs(op, first.simd, first.macro), first.sha256], recipe=_RECIPE)
        home = self.cache / "portable" / f"{op.id}-{first.simd}-{key}"
        file = home / f"{op.name}_op.so"
        if not home.exists():
            with fresh_folder(home) as scratch:
                self._link(first, scratch / file.name, scratch)
        return file

    def shim_objects(self, simd: Simd) -> tuple[Path, ...]:
        """The C ABI's own objects for a level: the same for every op. Raises :class:`CompileError`."""
        shim = [self._content(path) for path in self._shim()]
        key = cache_key([simd, self.compiler.key, *shim], recipe=_RECIPE)
        home = self.cache / "portable" / f"shim-{simd}-{key}"
        objects = tuple(home / f"{Path(name).stem}.o" for name in recipe.SHIM_SOURCES)
        if not home.exists():
            with fresh_folder(home) as scratch:
                for name, item in zip(recipe.SHIM_SOURCES, objects, strict=True):
                    words = ["-c", str(self.shim / name), "-o", str(scratch / item.name)]
                    self._run(
                        [*recipe.shim_flags(self.shim, simd), *words],
                        self.shim,
                        f"the C ABI of the portable tier for {simd}",
                    )
        return objects

    def _shim(self) -> list[Path]:
        return sorted(path for path in self.shim.rglob("*") if path.is_file())

    def _inputs(self, op: Op, simd: Simd, macro: str) -> tuple[str, ...]:
        shim = (self._content(path) for path in self._shim())
        return (op.id, *op.portable, simd, macro, self.compiler.key, *shim)

    @staticmethod
    def _content(path: Path) -> str:
        return path.read_text(encoding="utf-8")

    def _texts(self, sources: Sources) -> list[Path]:
        return sorted(set(reachable(sources.csrc, sources.op.portable)))

    def _expand(self, sources: Sources, simd: Simd, macro: str, folder: Path) -> None:
        digest, read = hashlib.sha256(), set[str]()
        for number, source in enumerate(sources.op.portable):
            text, depfile = folder / f"{number}.ii", folder / f"{number}.d"
            # The path is relative, so __FILE__ is too.
            words = recipe.preprocess(source, depfile, text)
            self._run(
                [*recipe.op_flags(self.shim, sources.op, simd, macro), *words], sources.csrc, _named(sources, simd)
            )
            digest.update(text.read_bytes())
            read |= set(depfile.read_text(encoding="utf-8").replace("\\\n", " ").partition(":")[2].split())
            text.unlink()
            depfile.unlink()
        first = list(sources.op.portable)
        # What the compiler was told by relative paths is DeepSpeed's; the shim and the system are absolute.
        local = {str(Path(name)) for name in read if not Path(name).is_absolute()} - set(first)
        result = {"sha256": digest.hexdigest(), "closure": [*first, *sorted(local)]}
        (folder / _RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")

    def _link(self, expansion: Expansion, target: Path, folder: Path) -> None:
        sources, simd = expansion.sources, expansion.simd
        what, objects = _named(sources, simd), []
        for source in sources.op.portable:
            objects.append(folder / (Path(source).stem + ".o"))
            words = ["-c", source, "-o", str(objects[-1])]
            self._run([*recipe.op_flags(self.shim, sources.op, simd, expansion.macro), *words], sources.csrc, what)
        inputs = (*objects, *self.shim_objects(simd))
        self._run(recipe.link(self.compiler, self.shim, inputs, target), sources.csrc, what)
        for item in objects:
            item.unlink()

    def _run(self, words: Sequence[str], folder: Path, what: str) -> None:
        environment = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
        try:
            self.runner.run([str(self.compiler.gxx), *words], cwd=folder, env=environment)
        except CommandError as error:
            raise CompileError(f"{what} did not compile\n{error}") from error


def _named(sources: Sources, simd: Simd) -> str:
    return f"portable {sources.op.id} of DeepSpeed {sources.releases[-1]} for {simd}"


def unpack_trees(sdists: Sdists, cache: Path) -> dict[str, Path]:
    """The csrc folder of every release, with what CPU optimizers are made of, unpacked into the cache."""
    trees = {}
    for release, tree in sdists.trees.items():
        home = cache / "csrc" / f"{release}-{tree.sdist_sha256[:16]}"
        if not home.exists():
            with fresh_folder(home) as scratch:
                csrc = sdists.unpack(release, scratch / "work") / "csrc"
                for name in _KEPT:
                    (csrc / name).rename(scratch / name)
                shutil.rmtree(scratch / "work")
        trees[release] = home
    return trees


def build_portable(
    ops: Iterable[Op], levels: Iterable[Simd], trees: Mapping[str, Path], compiler: PortableCompiler, jobs: int
) -> tuple[PortableArtifact, ...]:
    """Every portable library of one machine's ``levels``, for every release in ``trees`` (their csrc folders).

    Two groups of releases whose texts differ and whose libraries do not (a local variable was renamed) share the file.
    Raises :class:`CompileError`.
    """
    levels = tuple(levels)
    sources = [one for op in ops for one in read_sources(op, trees)]
    work = [(one, level) for level in levels for one in sources]
    with ThreadPoolExecutor(jobs) as pool:
        _all(pool, compiler.shim_objects, levels)
        expansions = tuple(_all(pool, lambda item: compiler.expand(*item), work))
        groups = same_code(expansions)
        files = tuple(_all(pool, compiler.compile, groups))
    same: dict[tuple[str, Simd, bytes], tuple[Path, list[Expansion]]] = {}
    for group, file in zip(groups, files, strict=True):
        key = (group[0].sources.op.id, group[0].simd, hashlib.sha256(file.read_bytes()).digest())
        same.setdefault(key, (file, []))[1].extend(group)
    artifacts = [_artifact(file, group) for file, group in same.values()]
    return tuple(sorted(artifacts, key=lambda one: (one.op.id, Version(one.sources[0].deepspeed[0]), one.simd.rank)))


def _artifact(file: Path, group: Sequence[Expansion]) -> PortableArtifact:
    first = group[0]
    return PortableArtifact(
        op=first.sources.op,
        simd=first.simd,
        kernel=first.macro.strip("_").lower(),
        path=file,
        sources=digests(group),
    )


def _all(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
    """The results in order; after a first failure what has not begun is not begun."""
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
