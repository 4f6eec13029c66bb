"""The core wheel in an environment of a user: what is chosen, what it computes, and that one OpenMP runtime does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from dsops_builder.errors import CommandError
from dsops_builder.model import Target, Wheel
from dsops_builder.smoke import optimizers
from dsops_builder.smoke.core_session import LABEL, judge_steps
from dsops_builder.smoke.environment import CleanEnvironment
from dsops_builder.smoke.judge import judge_run, train_in
from dsops_prebuilt._catalogue import PLATFORMS
from dsops_prebuilt._manifest import FILE_NAME, Manifest, TorchBinding
from dsops_prebuilt._variant import Simd

ROOT = Path(__file__).parents[2]
PARITY = str(ROOT / "tests/torch/parity.py")
# Every size up to two vectors of eight, tails of every length behind many, and one that more than one thread works on.
SIZES = (*range(1, 130), 255, 256, 257, 1000, 1023, 1024, 1025, 4096, 4097)
LEVEL = "import dsops_prebuilt; print(dsops_prebuilt.explain('cpu_adam').chosen.artifact.simd)"


@pytest.fixture(scope="module")
def portable(environment: CleanEnvironment) -> Path:
    """The folder of the portable payload in the environment."""
    return environment.payload.parent / LABEL


@pytest.fixture(scope="module")
def steps(environment: CleanEnvironment) -> dict[str, Any]:
    """Steps of all three CPU optimizers with portable modules."""
    written = environment.folder / "optimizers.json"
    environment.run([optimizers.__file__, str(written)], DSOPS_TIER="portable", DS_ACCELERATOR="cuda")
    report: dict[str, Any] = json.loads(written.read_text())
    return report


def test_the_wheels_are_for_the_platforms_that_the_loader_names(core_wheels: tuple[Wheel, ...]) -> None:
    platforms = {
        tag.platform
        for wheel in core_wheels
        for tag in parse_wheel_filename(wheel.path.name)[3]
        if tag.platform != "any"
    }
    assert platforms == {f"manylinux_{major}_{minor}_{name}" for name, (major, minor) in PLATFORMS.items()}


def test_the_portable_tier_trains(environment: CleanEnvironment, portable: Path) -> None:
    assert list(judge_run(train_in(environment, DSOPS_TIER="portable"), portable)) == []


def test_every_cpu_optimizer_steps(steps: dict[str, Any], portable: Path, target: Target) -> None:
    assert list(judge_steps(steps, portable, target.deepspeed)) == []


def test_a_file_of_another_release_would_be_found_out(steps: dict[str, Any], portable: Path) -> None:
    found = list(judge_steps(steps, portable, "0.14.4"))
    assert len(found) == 3
    assert all("which does not stand for DeepSpeed 0.14.4" in sentence for sentence in found)


def test_it_computes_what_the_stock_op_of_its_level_does_bit_for_bit(environment: CleanEnvironment) -> None:
    files = {tier: explained(environment, DSOPS_TIER=tier)["path"] for tier in ("stock", "portable")}
    levels = {tier: environment.run(["-c", LEVEL], DSOPS_TIER=tier) for tier in files}
    assert levels["stock"] == levels["portable"]
    found = json.loads(environment.run([PARITY, files["stock"], files["portable"], *map(str, SIZES)]))
    assert {name: result["differing"] for name, result in found.items()} == dict.fromkeys(found, 0)
    assert len(found) == 5
    for result in found.values():
        assert result["words"] == 8 * 3 * 3 * sum(SIZES)
        assert result["second_error_ulps"] <= result["first_error_ulps"]


def test_the_comparison_sees_another_level(environment: CleanEnvironment) -> None:
    files = {
        level: explained(environment, DSOPS_TIER="portable", DSOPS_SIMD=level)["path"]
        for level in ("x86_64", "x86_64_v3")
    }
    found = json.loads(environment.run([PARITY, *files.values(), "1000"]))
    assert all(result["differing"] > 0 for result in found.values())


def test_the_reference_trains_with_a_line_on_its_cost(environment: CleanEnvironment) -> None:
    facts = train_in(environment, DSOPS_TIER="reference")
    assert "/dsops_prebuilt/reference/" in facts["op_file"]
    assert facts["difference"] <= 1e-5


def explained(environment: CleanEnvironment, **variables: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        environment.run(["-m", "dsops_prebuilt", "explain", "cpu_adam", "--json"], **variables)
    )
    return answer


def test_forged_manifests_are_refused(environment: CleanEnvironment, portable: Path) -> None:
    path = portable / FILE_NAME
    honest = path.read_bytes()
    try:
        path.write_bytes(honest.replace(b'"x86_64_v4"', b'"x86_64"'))
        with pytest.raises(CommandError, match="its sha256 is") as refusal:
            environment.run(["-m", "dsops_prebuilt", "explain", "cpu_adam"], DSOPS_TIER="portable")
        assert "pip install --force-reinstall --no-deps dsops-prebuilt==" in str(refusal.value)
    finally:
        path.write_bytes(honest)


def test_nothing_in_it_is_bound_to_a_torch_or_a_python(portable: Path) -> None:
    manifest = Manifest.from_json((portable / FILE_NAME).read_bytes(), FILE_NAME)
    bindings: set[tuple[str | None, TorchBinding | None]] = {(one.python, one.torch) for one in manifest.artifacts}
    assert bindings == {(None, None)}
    assert {one.simd for one in manifest.artifacts} == {Simd.X86_64, Simd.X86_64_V3, Simd.X86_64_V4}
