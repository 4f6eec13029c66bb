from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.fakes import (
    CLOSURE,
    SRC,
    VERSION,
    FakeHost,
    artifact_of,
    fused_adam_of,
    host_of,
    manifest_of,
    torch_binding,
    write_payload,
)

from dsops_prebuilt import NoArtifactError
from dsops_prebuilt._explain import as_json, headline, miss, remedy, text
from dsops_prebuilt._host import Host, Libc
from dsops_prebuilt._load import Installed, Payload, find_payloads
from dsops_prebuilt._manifest import Artifact, Manifest, SourceDigest
from dsops_prebuilt._select import Request, Selection, select
from dsops_prebuilt._variant import Gpu, Simd, TorchBuild
from dsops_prebuilt.cli import main

ADAM = Request("cpu_adam", "cpu")


def have(*artifacts: Artifact, faults: tuple[str, ...] = (), **changes: Any) -> Installed:
    manifest: Manifest = manifest_of(*artifacts, **{"label": "cu126", **changes})
    return Installed((Payload(manifest, Path("/p")),) if artifacts else (), faults)


def selected(found: Installed, host: Host, request: Request = ADAM) -> Selection:
    return select(found.offers, request, host)


JIT = "only DeepSpeed's own build can serve it"
INSTALL = f'Run: pip install "dsops-prebuilt[cu126]=={VERSION}"'
UPGRADE = 'Run: pip install --upgrade "dsops-prebuilt[cu126]"'
OTHER = (SourceDigest("f" * 64, CLOSURE, ("0.18.1", "0.18.2")),)
OLD_TORCH, EXACT_TORCH = torch_binding(minor="2.6"), torch_binding(exact="2.7.0a0+nv")
LINUX_ONLY = "There are binaries for Linux with glibc only, not for"
REMEDIES = [
    ("nothing installed", have(), host_of(), INSTALL),
    ("no torch", have(), host_of(torch=None), INSTALL.replace("cu126", "cpu")),
    ("CUDA 11.8", have(), host_of(torch=TorchBuild("2.7.1+cu118", "11.8")), INSTALL.replace("cu126", "cu118")),
    ("op not in the payload", have(fused_adam_of()), host_of(), f"The payload cu126 does not hold this op; {JIT}"),
    ("op not in another payload", have(fused_adam_of(), label="cpu"), host_of(), INSTALL),
    ("unusable payload", have(faults=("/p: old; run: x",)), host_of(), "Repair what is installed: /p: old; run: x"),
    ("another payload, torch", have(artifact_of(torch=OLD_TORCH), label="cpu"), host_of(), INSTALL),
    ("torch", have(artifact_of(torch=OLD_TORCH)), host_of(), f'{UPGRADE} or: pip install "torch==2.6.*"'),
    ("exact torch", have(artifact_of(torch=EXACT_TORCH)), host_of(), UPGRADE),
    ("python and torch", have(artifact_of(python="cp39", torch=OLD_TORCH)), host_of(), UPGRADE),
    ("sources", have(artifact_of(sources=OTHER)), host_of(), f'{UPGRADE} or: pip install "deepspeed==0.18.2"'),
    (
        "sources, another payload",
        have(artifact_of(sources=OTHER), label="core"),
        host_of(),
        f'{UPGRADE} or: pip install "deepspeed==0.18.2"',
    ),
    ("no release named", have(artifact_of(sources=())), host_of(), UPGRADE),
    ("no sources", have(artifact_of()), host_of(csrc=None), "Run: pip install deepspeed"),
    ("processor", have(artifact_of(simd=Simd.X86_64_V4)), host_of(), f"No other payload changes that; {JIT}"),
    ("musl", have(), host_of(libc=Libc("musl")), f"{LINUX_ONLY} musl; {JIT}"),
    ("macOS", have(), host_of(system="Darwin", libc=None), f"{LINUX_ONLY} Darwin; {JIT}"),
]


@pytest.mark.parametrize(
    ("found", "host", "next_step"), [row[1:] for row in REMEDIES], ids=[row[0] for row in REMEDIES]
)
def test_the_next_step(found: Installed, host: Host, next_step: str) -> None:
    assert remedy(selected(found, host), host, found) == next_step


def test_the_headline_names_the_nearest_artifact() -> None:
    found = have(
        artifact_of(file="far.so", python="cp39", machine="aarch64"), artifact_of(file="near.so", python="cp312")
    )
    assert headline(selected(found, host_of()), host_of(), found) == (
        "no prebuilt cpu_adam (cpu) can be loaded here: nearest is cu126/near.so, but it is built for cp312, "
        f"and this interpreter is cp311. {UPGRADE}"
    )


def test_a_miss_word_for_word() -> None:
    found = have(fused_adam_of(), faults=("/q/manifest.json: not JSON",))
    host = host_of(visible=(Gpu("GPU-t4", 7, 5),))
    error = miss(selected(found, host, Request("fused_adam", "cuda")), host, found, ("ninja (it is not on PATH)",))
    assert isinstance(error, NoArtifactError)
    assert (
        str(error)
        == f"""\
no prebuilt fused_adam (cuda) can be loaded here: nearest is cu126/fused_adam_op.so, but it holds code for sm_80, sm_90, \
and none of it runs on GPU-t4 (compute capability 7.5). No other payload changes that; {JIT}

Asked for: fused_adam (cuda)
This machine:
  system    Linux x86_64, glibc 2.31, SIMD x86_64_v3
  python    cp311
  torch     2.7.1+cu126, CUDA 12.6, C++11 ABI 1
  deepspeed 0.19.8, sources /site/deepspeed/ops/csrc
  gpus      GPU-t4 (compute capability 7.5), driver for CUDA 12.8
Artifacts of fused_adam that are installed (1):
  cu126/fused_adam_op.so  [stock, x86_64_v3, build 1]  rejected
    gpu: it holds code for sm_80, sm_90, and none of it runs on GPU-t4 (compute capability 7.5)
Unusable: /q/manifest.json: not JSON
DeepSpeed cannot compile it here either; this machine lacks ninja (it is not on PATH)
To see every reason:
  dsops explain fused_adam --accelerator cuda"""
    )


def test_a_miss_with_many_artifacts_still_fits_one_screen() -> None:
    found = have(*(artifact_of(file=f"{n}.so", python="cp39") for n in range(40)))
    lines = str(miss(selected(found, host_of()), host_of(), found)).splitlines()
    assert "  and 35 more: dsops explain cpu_adam" in lines
    assert len(lines) <= 24


def test_a_host_of_which_nothing_is_known_is_still_put_into_words() -> None:
    nothing = FakeHost(None, None, None, None, None, None, None, None, None, tegra=False, visible=None)
    lines = text(selected(have(), nothing), nothing, have()).splitlines()
    assert lines[2:7] == [
        "  system    None None, libc unknown, SIMD unknown",
        "  python    None",
        "  torch     not installed",
        "  deepspeed not installed, sources not installed",
        "  gpus      unknown (libnvidia-ml.so.1 does not answer)",
    ]


def test_the_text_of_a_choice() -> None:
    found = have(artifact_of(), artifact_of(file="v4.so", simd=Simd.X86_64_V4), faults=("/q: bad",))
    assert text(selected(found, host_of()), host_of(), found).splitlines()[7:] == [
        "Chosen: cu126/cpu_adam_op.so",
        "  /p/cpu_adam_op.so",
        "Artifacts of cpu_adam (2), best first:",
        "  cu126/v4.so  [stock, x86_64_v4, build 1]  rejected",
        "    simd: it needs the SIMD level x86_64_v4, and this processor's is x86_64_v3",
        "  cu126/cpu_adam_op.so  [stock, x86_64_v3, build 1]  accepted",
        "Unusable: /q: bad",
    ]


def test_json_says_the_same() -> None:
    found = have(artifact_of(), artifact_of(file="v4.so", simd=Simd.X86_64_V4))
    said = json.loads(json.dumps(as_json(selected(found, host_of()), host_of(), found)))
    assert (said["op"], said["accelerator"], said["chosen"]) == ("cpu_adam", "cpu", "cu126/cpu_adam_op.so")
    assert said["path"] == "/p/cpu_adam_op.so"
    assert said["host"]["gpus"] == "GPU-a100 (compute capability 8.0)"
    assert [
        (item["artifact"], item["accepted"], [r["key"] for r in item["rejections"]]) for item in said["artifacts"]
    ] == [
        ("cu126/v4.so", False, ["simd"]),
        ("cu126/cpu_adam_op.so", True, []),
    ]


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    find_payloads.cache_clear()
    return tmp_path


def test_explain_of_what_fits_exits_with_0(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_payload(entry, manifest_of(artifact_of()), {})
    assert main(["explain", "cpu_adam"], host_of()) == 0
    assert "Asked for: cpu_adam (cuda)" in capsys.readouterr().out
    assert main(["explain", "cpu_adam", "--accelerator", "cpu", "--json"], host_of()) == 0
    assert json.loads(capsys.readouterr().out)["accelerator"] == "cpu"


@pytest.mark.usefixtures("entry")
def test_explain_of_what_does_not_fit_exits_with_5(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cpu_lion"], host_of()) == NoArtifactError.exit_code == 5
    printed = capsys.readouterr()
    assert "Chosen: none; no prebuilt cpu_lion (cuda) can be loaded here" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("cpu_adan", "dsops: 'cpu_adan' is not an op; did you mean cpu_adam? accepted: async_io, cpu_adagrad, "),
        ("zzzz", "dsops: 'zzzz' is not an op; accepted: async_io, cpu_adagrad, "),
    ],
)
@pytest.mark.usefixtures("entry")
def test_an_unknown_op_names_the_nearest(capsys: pytest.CaptureFixture[str], op: str, message: str) -> None:
    assert main(["explain", op], host_of()) == 2
    assert capsys.readouterr().err.startswith(message)


def test_an_op_that_only_a_payload_knows_is_known(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_payload(entry, manifest_of(artifact_of(op="new_op")), {})
    assert main(["explain", "new_op", "--accelerator", "cpu"], host_of()) == 0
    assert "Chosen: cpu/cpu_adam_op.so" in capsys.readouterr().out


def test_list(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    portable = artifact_of(file="p.so", tier="portable", python=None, torch=None)
    folder = write_payload(entry, manifest_of(fused_adam_of(), portable), {})
    write_payload(entry, manifest_of(version="0.0.1", label="old"), {})
    assert main(["list"], host_of()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"dsops-prebuilt-cpu {VERSION}, build 1, label cpu: {folder}"
    assert lines[1] == "  fused_adam (cuda)  stock  cp311, torch 2.7, CUDA 12.6, x86_64_v3  fused_adam_op.so"
    assert lines[2] == "  cpu_adam (cpu, cuda)  portable  any Python, any torch, x86_64_v3  p.so"
    assert lines[3].startswith("Unusable: ")
    assert main(["list", "--json"], host_of()) == 0
    said = json.loads(capsys.readouterr().out)
    assert [made["op"] for made in said["payloads"][0]["artifacts"]] == ["fused_adam", "cpu_adam"]
    assert len(said["faults"]) == 1


def test_list_of_nothing(entry: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(entry)])
    assert main(["list"], host_of()) == 0
    assert capsys.readouterr().out == "No payload is installed. Run: dsops explain cpu_adam\n"


@pytest.mark.parametrize("arguments", [[], ["explain"], ["nothing"], ["explain", "cpu_adam", "--accelerator", "tpu"]])
def test_usage_faults_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments, host_of())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: dsops")


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsops_prebuilt", "--version"],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"dsops-prebuilt {VERSION}\n"


@pytest.mark.usefixtures("entry")
def test_a_word_that_is_not_accepted_is_an_error_with_its_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsops_prebuilt", "explain", "cpu_adam"],
        env={"PYTHONPATH": str(SRC), "DSOPS_SIMD": "sse9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr[:40]) == (2, "dsops: 'sse9' is not a SIMD level; accep")
