"""Compile one target: DeepSpeed's setup.py in a fresh tree, and what it read, kept by what decided it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dsops_builder import flags
from dsops_builder.cache import cache_key, fresh_folder
from dsops_builder.compiler import CompilerHome
from dsops_builder.errors import CommandError, CompileError
from dsops_builder.fetch import Sdists
from dsops_builder.model import Compiled, Target
from dsops_builder.process import Runner
from dsops_builder.stock import driver
from dsops_builder.toolkit import CudaHome
from dsops_builder.torchenv import TorchEnv
from dsops_prebuilt._manifest import closure_sha256

_RESULT = "compiled.json"
_SHOWN = 60


def diagnostics(output: str) -> str:
    """The compilers' own lines about errors among what ninja printed; empty when no compilation failed.

    ninja prints ``FAILED:``, the command in one long line, and then what the command printed; further steps begin with
    their number in brackets, and ninja's last word with its name. Warnings about torch's headers, hundreds of lines of
    them, are left out; an error comes with the two lines after it, where gcc shows the place.
    """
    shown: list[str] = []
    blocks = re.split(r"^FAILED: .*\n.*\n", output, flags=re.MULTILINE)[1:]
    for block in blocks:
        end = re.search(r"^(?:\[\d+/\d+\] |ninja: )", block, flags=re.MULTILINE)
        lines = block[: end.start() if end else None].splitlines()
        errors = [number for number, line in enumerate(lines) if re.search("error: |undefined reference", line)]
        kept = {near for number in errors for near in range(number, number + 3)} or set(range(len(lines)))
        shown += [line for number, line in enumerate(lines) if number in kept]
    return "\n".join(shown[:_SHOWN])


@dataclass(frozen=True, kw_only=True, slots=True)
class StockCompiler:
    """Compiles targets of the stock tier, each at most once: results lie in ``cache/compiled`` by what decided them."""

    sdists: Sdists
    compiler: CompilerHome
    cache: Path
    jobs: int
    runner: Runner

    def compile(self, target: Target, env: TorchEnv, cuda: CudaHome | None) -> Compiled:
        """Return the target's shared object, stripped.

        Raises :class:`CompileError`, with the compiler's own lines, when it does not compile or DeepSpeed left it out.
        """
        home = self.cache / "compiled" / self._key(target, env, cuda)
        if not home.exists():
            with fresh_folder(home) as scratch:
                self._build(target, env, cuda, scratch)
        kept = json.loads((home / _RESULT).read_text(encoding="utf-8"))
        return Compiled(
            target=target,
            path=home / kept["file"],
            closure=tuple(kept["closure"]),
            closure_sha256=kept["closure_sha256"],
            defines=tuple(kept["defines"]),
            torch_built_with=env.torch_version,
            provenance=self._provenance(env, cuda),
        )

    def _key(self, target: Target, env: TorchEnv, cuda: CudaHome | None) -> str:
        sources = self.sdists.trees[target.deepspeed].sdist_sha256
        toolkit = "" if target.op.kernel == "host" or cuda is None else cuda.key
        what = (target.op.id, target.accelerator, target.simd.value, *flags.gencode(target.archs), target.python)
        inputs = (*what, sources, self.compiler.key, toolkit, env.key)
        key = cache_key(inputs, recipe=(__file__, flags.__file__, driver.__file__))
        return f"{target.op.id}-{target.simd.value}-{key}"

    def _provenance(self, env: TorchEnv, cuda: CudaHome | None) -> tuple[tuple[str, str], ...]:
        items = {"host_compiler": self.compiler.description, "torch_headers": env.description}
        if cuda is not None:
            items["toolkit"] = cuda.description
        return tuple(sorted(items.items()))

    def _build(self, target: Target, env: TorchEnv, cuda: CudaHome | None, folder: Path) -> None:
        work = folder / "work"
        work.mkdir()
        tree = self.sdists.unpack(target.deepspeed, work)
        self._run_setup(target, env, cuda, work, tree)
        report = json.loads((work / "report.json").read_text(encoding="utf-8"))
        built = sorted((work / "lib").rglob("*.so"))
        if report["module"] != target.op.module or [path.name.split(".")[0] for path in built] != [
            target.op.module.rpartition(".")[2]
        ]:
            raise CompileError(f"{target.id}: expected {target.op.module}, DeepSpeed made {report['module']}: {built}")
        closure = self._closure(report["sources"], work, tree, env)
        final = folder / built[0].name
        self.runner.run([str(self.compiler.strip), "--strip-unneeded", "-o", str(final), str(built[0])])
        result = {
            "file": final.name,
            "closure": closure,
            "closure_sha256": closure_sha256(tree / "csrc", closure),
            "defines": flags.defines(report["flags"]),
        }
        (folder / _RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")
        shutil.rmtree(work)

    def _run_setup(self, target: Target, env: TorchEnv, cuda: CudaHome | None, work: Path, tree: Path) -> None:
        options = {
            "op": target.op.name,
            "accelerator": target.accelerator,
            "cuda": None if cuda is None else cuda.release,
            "march": flags.march(target.simd),
            "simd_macro": flags.simd_macro(target.simd),
            "gencode": flags.gencode(target.archs),
            "bf16": flags.has_bf16(target.archs),
            "build_lib": str(work / "lib"),
            "build_temp": str(work / "temp"),
            "report": str(work / "report.json"),
        }
        (work / "options.json").write_text(json.dumps(options), encoding="utf-8")
        command = [str(env.python), driver.__file__, str(work / "options.json")]
        log = self.cache / "log" / f"{target.id.replace('/', '-')}.txt"
        log.parent.mkdir(exist_ok=True)
        try:
            self.runner.run(command, cwd=tree, env=self._environment(target, env, cuda, work, tree), log=log)
        except CommandError as error:
            said = diagnostics(error.output)
            detail = f"{said}\nThe whole output: {log}" if said else str(error)
            raise CompileError(f"{target.id} did not compile\n{detail}") from error

    def _environment(
        self, target: Target, env: TorchEnv, cuda: CudaHome | None, work: Path, tree: Path
    ) -> dict[str, str]:
        """The whole environment of a compilation: nothing of the caller's shell decides what comes out."""
        link = " ".join((str(self.compiler.gxx), "-shared", *self.compiler.link_flags))
        # Assertions in torch's headers put __FILE__ into the binary; where it was built is nobody's business.
        maps = {self.cache: ".", env.torch_lib.parents[1]: ".", work: ".", tree: "."}
        # DeepSpeed asks for -g. Debug information is stripped, changes no instruction (GCC manual, -fcompare-debug),
        # and takes twice the memory: 1.9 GB for one file of cpu_adam.
        compiler_flags = ["-g0", *(f"-ffile-prefix-map={path}={name}" for path, name in maps.items())]
        variables = {
            "HOME": str(work),
            "LANG": "C.UTF-8",
            "CC": str(self.compiler.gcc),
            "CXX": str(self.compiler.gxx),
            "LDSHARED": link,
            "LDCXXSHARED": link,
            "DSOPS_COMPILER_FLAGS": " ".join(compiler_flags),
            **dict(env.variables),
            **flags.variables(target, self.jobs),
        }
        if cuda is not None:
            variables["CUDA_HOME"] = str(cuda.path)
        return variables

    def _closure(self, sources: list[str], work: Path, tree: Path, env: TorchEnv) -> list[str]:
        """DeepSpeed's files that were read, below csrc: sources in the builder's order, then headers sorted.

        ninja keeps what the compilers' depfiles said; ``-t deps`` prints it, each path indented.
        """
        ninja = env.python.parent / "ninja"
        printed = self.runner.run([str(ninja), "-C", str(work / "temp"), "-t", "deps"])
        csrc = (tree / "csrc").resolve()
        read = set()
        for line in printed.splitlines():
            path = (work / "temp" / line.strip()).resolve()
            if line.startswith("    ") and path.is_relative_to(csrc):
                read.add(path.relative_to(csrc).as_posix())
        first = [source.removeprefix("csrc/") for source in sources]
        if not set(first) <= read:
            raise CompileError(f"ninja knows no dependencies of {sorted(set(first) - read)}; the digest would be wrong")
        return [*first, *sorted(read - set(first))]
