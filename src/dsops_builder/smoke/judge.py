"""Hold a run, and what surrounds it, against what was promised: each broken promise is one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsops_builder.errors import CommandError, SmokeError
from dsops_builder.smoke import train
from dsops_builder.smoke.environment import CleanEnvironment
from dsops_builder.smoke.trace import compilers, executed
from dsops_prebuilt._errors import NoArtifactError

# float32 after 20 steps at lr 1e-2: two correct optimizers that round differently end about 3e-7 apart; gradients that
# were clipped once, or a step too many, leave 1e-3 and more.
_TOLERANCE = 1e-5
_KEYS = """
import dsops_prebuilt
print(*(item.key for verdict in dsops_prebuilt.explain("{op}", "cuda").verdicts for item in verdict.rejections))
"""
_LOAD = "import deepspeed; print(deepspeed.ops.adam.cpu_adam.CPUAdamBuilder().load().__file__)"


def train_in(environment: CleanEnvironment, **variables: str) -> dict[str, Any]:
    """Run the training script under strace and return what it reported, with the programs that ran."""
    written, log = environment.folder / "report.json", environment.folder / "strace.log"
    try:
        environment.traced([train.__file__, str(written)], log, **variables)
    except CommandError as error:
        tried = compilers(executed(log.read_text(encoding="utf-8"))) if log.exists() else ()
        asked = f"\nprograms asked for that compile: {', '.join(tried)}" if tried else ""
        raise SmokeError(f"training failed: {error}{asked}") from error
    facts: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return {**facts, "programs": tuple(executed(log.read_text(encoding="utf-8")))}


def judge_run(facts: Mapping[str, Any], payload: Path) -> Iterator[str]:
    """What of a training run was not as promised, a sentence each. ``payload`` is the folder the op must come from."""
    if not Path(facts["op_file"]).is_relative_to(payload):
        yield f"cpu_adam was loaded from {facts['op_file']}, not from {payload}"
    foreign = {op: file for op, file in facts["loaded"].items() if not Path(file).is_relative_to(payload)}
    if foreign:
        yield f"loaded from outside the payload: {foreign}"
    if facts["optimizer"] != "DeepSpeedCPUAdam":
        yield f"the optimizer was {facts['optimizer']}, not DeepSpeedCPUAdam"
    if not facts["difference"] <= _TOLERANCE:
        yield f"weights differ from torch.optim.AdamW by {facts['difference']}, more than {_TOLERANCE}"
    if facts["losses"][-1] == facts["losses"][0]:
        yield "the loss did not change: nothing was trained"
    if facts["jit_calls"]:
        yield f"torch.utils.cpp_extension was asked to compile {', '.join(facts['jit_calls'])}"
    if len(facts["openmp"]) != 1:
        yield f"not one OpenMP runtime in the process, but {facts['openmp']}"
    if not facts["programs"]:
        yield "strace saw no program at all, not even Python: the watch itself failed"
    found = compilers(facts["programs"])
    if found:
        yield f"a compiler was started or looked for: {', '.join(found)}"


def judge_surroundings(
    environment: CleanEnvironment, cuda_ops: Iterable[str], facts: Mapping[str, Any]
) -> Iterator[str]:
    """What of the surroundings was not as promised: hostile machines, the report, the explanation.

    ``cuda_ops`` are those of the installed payload, which this machine's torch or GPU cannot run.
    """
    fake = environment.folder / "fake-cuda"
    (fake / "bin").mkdir(parents=True)
    (fake / "bin/nvcc").write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 12.1, V12.1.105'\n", encoding="ascii"
    )
    (fake / "bin/nvcc").chmod(0o755)
    # /proc takes no file from anybody, so it is read-only for root too. Where triton is installed, DeepSpeed itself may
    # make a folder in HOME while it is imported, unless it is told another place.
    read_only = {"HOME": "/proc", "TRITON_CACHE_DIR": str(environment.folder / "home")}
    for name, variables in {"CUDA_HOME with nvcc 12.1": {"CUDA_HOME": str(fake)}, "read-only HOME": read_only}.items():
        printed = environment.run(["-c", _LOAD], **variables)
        if facts["op_file"] not in printed:
            yield f"with {name}, cpu_adam came from elsewhere: {printed}"
    table = environment.run([str(environment.python.parent / "ds_report")])
    installed = [line for line in table.splitlines() if line.startswith("cpu_adam ")]
    if not installed or "[YES]" not in installed[0] or "[OKAY]" not in installed[0]:
        yield f"ds_report does not show cpu_adam as installed: {installed}"
    answer = json.loads(environment.run(["-m", "dsops_prebuilt", "explain", "cpu_adam", "--json"]))
    if answer["path"] != facts["op_file"]:
        yield f"dsops explain cpu_adam chose {answer['path']}, and {facts['op_file']} was loaded"
    for op in cuda_ops:
        yield from _must_refuse(environment, op)


def _must_refuse(environment: CleanEnvironment, op: str) -> Iterator[str]:
    """This machine cannot run the op's GPU code (torch of another label, or no GPU): the answer must name that key."""
    keys = set(environment.run(["-c", _KEYS.format(op=op)]).split())
    expected = "gpu" if keys == {"gpu"} else "cuda"
    if expected not in keys:
        yield f"dsops explain {op} --accelerator cuda rejects on {sorted(keys)}, and should on cuda or gpu"
    try:
        printed = environment.run(["-m", "dsops_prebuilt", "explain", op, "--accelerator", "cuda"])
    except CommandError as error:
        if error.code != NoArtifactError.exit_code:
            yield f"dsops explain {op} --accelerator cuda: {error}"
    else:
        yield f"dsops explain {op} --accelerator cuda accepted an artifact that cannot run here:\n{printed}"
