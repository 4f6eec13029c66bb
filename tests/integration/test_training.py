"""From DeepSpeed's sources to a training step on a machine without a compiler, and everything that must stop it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.errors import CommandError, SmokeError
from dsops_builder.plan import Plan
from dsops_builder.smoke.environment import CleanEnvironment
from dsops_builder.smoke.judge import judge_run, judge_surroundings, train_in
from dsops_prebuilt._manifest import FILE_NAME, Manifest, file_sha256

LOAD = "import deepspeed; print(deepspeed.ops.adam.cpu_adam.CPUAdamBuilder().load().__file__)"


@pytest.fixture(scope="module")
def facts(environment: CleanEnvironment) -> dict[str, Any]:
    """What a training run of 20 steps reported, and every program that it asked for."""
    return train_in(environment)


@pytest.fixture
def chosen(environment: CleanEnvironment) -> Path:
    """The file that this machine loads."""
    return Path(json.loads(environment.run(["-m", "dsops_prebuilt", "explain", "cpu_adam", "--json"]))["path"])


@pytest.fixture
def restored(environment: CleanEnvironment) -> Iterator[None]:
    """Put back, after a test, whatever it changed in the payload's folder."""
    files = {path: path.read_bytes() for path in environment.payload.rglob("*") if path.is_file()}
    yield
    for path, content in files.items():
        path.write_bytes(content)


def test_training_keeps_every_promise(environment: CleanEnvironment, facts: dict[str, Any]) -> None:
    assert list(judge_run(facts, environment.payload)) == []


def test_surroundings_keep_every_promise(environment: CleanEnvironment, facts: dict[str, Any]) -> None:
    assert list(judge_surroundings(environment, (), facts)) == []


def test_the_watch_fires_when_the_hook_is_off(environment: CleanEnvironment) -> None:
    # The same script in the same environment, left to DeepSpeed: it must want a compiler, and the watch must see it.
    with pytest.raises(SmokeError, match="ninja"):
        train_in(environment, DSOPS_DISABLE="1")


@pytest.mark.usefixtures("restored")
def test_a_flipped_byte_in_the_op_is_refused_with_its_path_and_both_hashes(
    environment: CleanEnvironment, chosen: Path
) -> None:
    recorded = file_sha256(chosen)
    content = bytearray(chosen.read_bytes())
    content[len(content) // 2] ^= 1
    chosen.write_bytes(content)
    with pytest.raises(CommandError) as refusal:
        environment.run(["-c", LOAD])
    for word in (str(chosen), recorded, file_sha256(chosen)):
        assert word in str(refusal.value)


@pytest.mark.usefixtures("restored")
def test_a_changed_manifest_is_refused_with_its_path_and_both_hashes(environment: CleanEnvironment) -> None:
    manifest = environment.payload / FILE_NAME
    recorded = file_sha256(manifest)
    manifest.write_text(manifest.read_text().replace('"cp311"', '"cp312"'))
    with pytest.raises(CommandError) as refusal:
        environment.run(["-c", LOAD], DSOPS_TIER="stock")
    # Where another payload serves, that one is used, and the damaged one is still named.
    printed = environment.run(["-c", LOAD])
    assert "dsops_prebuilt_payloads/portable/cpu_adam/" in printed.splitlines()[-1]
    for word in (str(manifest), recorded, file_sha256(manifest)):
        assert word in str(refusal.value)
        assert word in printed


def test_a_miss_is_answered_on_one_screen_and_never_by_ds_opt_adam(environment: CleanEnvironment) -> None:
    # The wheels are there and DeepSpeed's sources are not those that they were built from.
    (header,) = environment.payload.parents[1].glob("deepspeed/ops/csrc/includes/cpu_adam.h")
    content = header.read_bytes()
    script = "import torch, deepspeed; deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(4))])"
    try:
        header.write_bytes(content + b"\n")
        with pytest.raises(CommandError) as refusal:
            environment.run(["-c", script])
    finally:
        header.write_bytes(content)
    answer = str(refusal.value)
    # The line of DeepSpeed that was running is in the traceback; its masked error must not be.
    assert "no attribute 'ds_opt_adam'" not in answer
    assert "NoArtifactError: no prebuilt cpu_adam" in answer
    assert "dsops explain cpu_adam" in answer


def test_the_wheel_says_what_it_was_made_of(environment: CleanEnvironment, plan: Plan) -> None:
    path = environment.payload / FILE_NAME
    manifest = Manifest.from_json(path.read_text(), str(path))
    assert {(one.op, one.simd) for one in manifest.artifacts} == {
        (target.op.name, target.simd) for target in plan.targets
    }
    assert [key for key, _ in manifest.provenance] == ["host_compiler", "torch_headers"]
    for artifact in manifest.artifacts:
        assert artifact.sources[0].closure[:2] == ("adam/cpu_adam.cpp", "adam/cpu_adam_impl.cpp")
        assert "includes/simd.h" in artifact.sources[0].closure
        assert artifact.glibc <= (2, 28)
        assert not [name for name in artifact.needed if name.startswith(("libcu", "libgomp"))]
