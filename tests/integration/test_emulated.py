"""Portable libraries on processors that this machine does not have: each SIMD level on its own processor, and one below.

tests/data/portable_driver.c opens them, so that nothing but the library decides which instructions are run.
"""

from __future__ import annotations

import math
import random
import signal
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from pathlib import Path

import pytest

from dsops_builder.compiler import CompilerHome, set_up_compiler
from dsops_builder.emulator import Emulator, set_up_emulator
from dsops_builder.errors import CommandError
from dsops_builder.fetch import Sdists
from dsops_builder.model import Matrix
from dsops_builder.ops import load_ops
from dsops_builder.pipeline import Workplace
from dsops_builder.portable import PortableCompiler
from dsops_builder.portable.build import unpack_trees
from dsops_builder.portable.sources import read_sources
from dsops_builder.process import Shell
from dsops_builder.smoke.environment import CleanEnvironment
from dsops_prebuilt._variant import Simd

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "ops/_portable"
ELEMENTS = 1003  # a whole number of no vector
STEPS = 3
MOST_ULPS = 2 * STEPS
"""What two machines may differ by, in units in the last place of the largest term of a sum.

They differ in what is fused: the baseline of x86-64 has no FMA, the vector kernels ask for it, and on aarch64 gcc makes
one of any product and sum (-ffp-contract=fast). A fused product is not rounded before the sum, half a unit at most, and
each of the two sides may have fused another one; with the rounding of the result that is two units a step.
"""


@dataclass(frozen=True)
class Build:
    """cpu_adam of one DeepSpeed release for one SIMD level; ``macro`` is the kernel that must come of it."""

    simd: Simd
    macro: str
    release: str = "0.19.8"


BASELINE = Build(Simd.X86_64, "__SCALAR__")
V3 = Build(Simd.X86_64_V3, "__AVX256__")
V4 = Build(Simd.X86_64_V4, "__AVX512__")
NEON = Build(Simd.AARCH64, "__NEON__")
# The last release whose sources know no NEON.
SCALAR = Build(Simd.AARCH64, "__SCALAR__", release="0.19.6")


@dataclass(frozen=True)
class Format:
    """A scalar type: torch's number, bytes, bits of the significand, and the exponent of the least normal number."""

    number: int
    width: int
    digits: int
    least: int

    def pack(self, values: Iterable[float]) -> bytes:
        if self is BFLOAT16:
            return b"".join(struct.pack("<f", value)[2:] for value in values)
        return b"".join(struct.pack("<e" if self is FLOAT16 else "<f", value) for value in values)

    def unpack(self, content: bytes) -> list[float]:
        items = [content[place : place + self.width] for place in range(0, len(content), self.width)]
        if self is BFLOAT16:
            return [float(struct.unpack("<f", b"\0\0" + item)[0]) for item in items]
        return [float(struct.unpack("<e" if self is FLOAT16 else "<f", item)[0]) for item in items]

    def ulp(self, value: float) -> float:
        return math.ldexp(1.0, max(math.frexp(value)[1] - 1, self.least) - self.digits + 1)


FLOAT16 = Format(number=5, width=2, digits=11, least=-14)
FLOAT32 = Format(number=6, width=4, digits=24, least=-126)
BFLOAT16 = Format(number=15, width=2, digits=8, least=-126)


@dataclass(frozen=True)
class Types:
    """The scalar types of params and grads, and of both states."""

    params: Format
    states: Format

    @property
    def results(self) -> tuple[Format, Format, Format]:
        return self.params, self.states, self.states


PAIRS = {
    "float32": Types(FLOAT32, FLOAT32),
    "float16 with float32": Types(FLOAT16, FLOAT32),
    "float16": Types(FLOAT16, FLOAT16),
    "bfloat16 with float32": Types(BFLOAT16, FLOAT32),
    "bfloat16": Types(BFLOAT16, BFLOAT16),
}


@dataclass(frozen=True)
class Results:
    """params, exp_avg and exp_avg_sq after the steps."""

    tensors: Sequence[Sequence[float]]

    def ulps_from(self, exact: Exact, types: Types) -> list[float]:
        return self._ulps(exact.tensors, exact, types)

    def ulps_apart(self, other: Results, exact: Exact, types: Types) -> list[float]:
        return self._ulps(other.tensors, exact, types)

    def _ulps(self, others: Sequence[Sequence[float]], exact: Exact, types: Types) -> list[float]:
        """The largest difference of each tensor, in units of the exact sums' largest terms."""
        return [
            max(abs(a - b) / kind.ulp(term) for a, b, term in zip(mine, other, terms, strict=True))
            for mine, other, terms, kind in zip(self.tensors, others, exact.terms, types.results, strict=True)
        ]


@dataclass(frozen=True)
class Exact:
    """The same steps in float64, and the largest term that was added up for each element."""

    tensors: Sequence[Sequence[float]]
    terms: Sequence[Sequence[float]]


@once
def inputs(types: Types) -> bytes:
    """params, grads, exp_avg and exp_avg_sq. Squares of the gradients stay above float16's subnormal numbers."""
    numbers = random.Random(0)  # noqa: S311  not for secrets

    def signed() -> list[float]:
        return [numbers.choice((-1, 1)) * numbers.uniform(0.5, 2) for _ in range(ELEMENTS)]

    params, grads, exp_avg, exp_avg_sq = signed(), signed(), signed(), [abs(value) for value in signed()]
    return b"".join(
        [types.params.pack(params), types.params.pack(grads), types.states.pack(exp_avg), types.states.pack(exp_avg_sq)]
    )


def given(types: Types) -> list[list[float]]:
    """The input tensors as numbers."""
    middle = 2 * ELEMENTS * types.params.width
    content = inputs(types)
    numbers = [*types.params.unpack(content[:middle]), *types.states.unpack(content[middle:])]
    return [numbers[start : start + ELEMENTS] for start in range(0, len(numbers), ELEMENTS)]


def untouched(types: Types) -> list[list[float]]:
    """What the output would be if no step were taken."""
    params, _, exp_avg, exp_avg_sq = given(types)
    return [params, exp_avg, exp_avg_sq]


@once
def exact(types: Types) -> Exact:
    """AdamW as csrc/adam/cpu_adam_impl.cpp has it (Step_1), with the numbers that the driver passes as float."""
    lr, beta1, beta2, eps, decay = FLOAT32.unpack(FLOAT32.pack((0.02, 0.9, 0.95, 1e-8, 0.1)))
    rows, terms = [], []
    for p, g, m, v in zip(*given(types), strict=True):
        param, first, second = p, m, v
        largest = (abs(p), abs(m), abs(v))
        for step in range(1, STEPS + 1):
            first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
            denominator = math.sqrt(second) / math.sqrt(1 - beta2**step) + eps
            param -= lr * decay * param + lr / (1 - beta1**step) * first / denominator
            largest = tuple(map(max, largest, (abs(param), abs(first), abs(second))))
        rows.append((param, first, second))
        terms.append(largest)
    return Exact(tensors=list(zip(*rows, strict=True)), terms=list(zip(*terms, strict=True)))


@pytest.fixture(scope="session")
def cross(matrix: Matrix, place: Workplace) -> CompilerHome:
    """The matrix's compiler for aarch64."""
    return set_up_compiler(matrix.cross_compilers["aarch64"], place.mirror(Shell()), place.cache, Shell())


@pytest.fixture(scope="session")
def compilers(compiler: CompilerHome, cross: CompilerHome) -> dict[str, CompilerHome]:
    """By machine."""
    return {home.machine: home for home in (compiler, cross)}


@pytest.fixture(scope="session")
def emulator(matrix: Matrix, place: Workplace) -> Emulator:
    """The matrix's emulators."""
    return set_up_emulator(matrix.emulator, place.mirror(Shell()), place.cache, Shell())


@pytest.fixture(scope="session")
def library(compilers: dict[str, CompilerHome], matrix: Matrix, place: Workplace) -> Callable[[Build], Path]:
    """Compiles a portable cpu_adam."""
    (op,) = (op for op in load_ops(ROOT / "ops") if op.id == "cpu_adam")

    @once
    def build(what: Build) -> Path:
        sdists = Sdists({what.release: matrix.deepspeed[what.release]}, place.cache, Shell())
        (sources,) = read_sources(op, unpack_trees(sdists, place.cache))
        portable = PortableCompiler(compiler=compilers[what.simd.machine], shim=SHIM, cache=place.cache, runner=Shell())
        expansion = portable.expand(sources, what.simd)
        assert expansion.macro == what.macro
        return portable.compile([expansion])

    return build


@pytest.fixture(scope="session")
def steps_on(
    library: Callable[[Build], Path],
    compilers: dict[str, CompilerHome],
    emulator: Emulator,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Build, str, Types], Results]:
    """Runs a library on a processor."""
    folder = tmp_path_factory.mktemp("emulated")
    drivers = {machine: folder / f"driver-{machine}" for machine in compilers}
    for machine, driver in drivers.items():
        home = compilers[machine]
        code = str(ROOT / "tests/data/portable_driver.c")
        Shell().run([str(home.gcc), "-std=c11", "-Wall", code, *home.link_flags, "-ldl", "-o", str(driver)])

    @once
    def run(what: Build, cpu: str, types: Types) -> Results:
        source, found = folder / "input", folder / "output"
        source.write_bytes(inputs(types))
        found.unlink(missing_ok=True)
        front = emulator.command(what.simd.machine, cpu, compilers[what.simd.machine].sysroot)
        words = [library(what), source, found, types.params.number, types.states.number, STEPS]
        Shell().run([*front, str(drivers[what.simd.machine]), *map(str, words)], cwd=folder)
        content, tensors = found.read_bytes(), []
        for kind in types.results:
            size = ELEMENTS * kind.width
            tensors.append(kind.unpack(content[:size]))
            content = content[size:]
        return Results(tensors)

    return run


@pytest.mark.parametrize("types", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize(
    ("what", "cpu"),
    [(V3, "Haswell"), (NEON, "cortex-a57"), (SCALAR, "cortex-a57")],
    ids=["x86_64_v3", "aarch64 NEON", "aarch64 scalar"],
)
def test_every_level_computes_what_the_baseline_does(
    steps_on: Callable[[Build, str, Types], Results], what: Build, cpu: str, types: Types
) -> None:
    found = steps_on(what, cpu, types)
    baseline = steps_on(replace(BASELINE, release=what.release), "Nehalem", types)

    # What was left as it was would be found out.
    assert min(Results(untouched(types)).ulps_apart(baseline, exact(types), types)) > 2 * MOST_ULPS
    assert max(found.ulps_apart(baseline, exact(types), types)) <= MOST_ULPS
    # And none is further than the baseline from what float64 makes of the same numbers.
    pairs = zip(found.ulps_from(exact(types), types), baseline.ulps_from(exact(types), types), strict=True)
    assert max(mine - theirs for mine, theirs in pairs) <= 1


@pytest.mark.parametrize(
    ("what", "cpu"), [(V3, "Nehalem"), (V4, "Haswell")], ids=["x86_64_v3 without AVX", "x86_64_v4 without AVX-512"]
)
def test_a_level_above_the_processors_dies_of_its_instructions(
    steps_on: Callable[[Build, str, Types], Results], what: Build, cpu: str
) -> None:
    with pytest.raises(CommandError) as death:
        steps_on(what, cpu, PAIRS["float32"])
    assert death.value.code == -signal.SIGILL


STOCK = """
import importlib.util, sys
from importlib.machinery import ExtensionFileLoader
import torch

loader = ExtensionFileLoader("cpu_adam_op", sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("cpu_adam_op", sys.argv[1], loader=loader))
loader.exec_module(module)
module.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
print("stepped", module.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *[torch.ones(1000) for _ in range(4)]))
"""


@pytest.mark.parametrize(("level", "dies"), [("x86_64_v3", False), ("x86_64_v4", True)])
def test_a_stock_op_of_an_avx512_machine_dies_on_one_without(
    environment: CleanEnvironment, emulator: Emulator, level: str, dies: bool
) -> None:
    """What ``-march=native`` makes there, in an image that is started here: the field's ``Illegal instruction``."""
    (file,) = environment.payload.glob(f"torch*/cpu_adam/ds*/{level}/*.so")
    front = emulator.command("x86_64", "Haswell")
    command = [*front, str(environment.python), "-c", STOCK, str(file)]
    if dies:
        with pytest.raises(CommandError) as death:
            Shell().run(command)
        assert death.value.code == -signal.SIGILL
    else:
        assert "stepped 0" in Shell().run(command)
