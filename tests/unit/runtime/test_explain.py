from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.fakes import (
    CLOSURE,
    SRC,
    VERSION,
    FakeHost,
    artifact_of,
    cuda_binding,
    fused_adam_of,
    host_of,
    manifest_of,
    torch_binding,
    write_payload,
)

from dsops_prebuilt import NoArtifactError
from dsops_prebuilt._explain import as_json, miss, text
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import Installed, Payload, find_payloads
from dsops_prebuilt._manifest import Artifact, Manifest, SourceDigest
from dsops_prebuilt._remedy import headline, remedy
from dsops_prebuilt._select import Request, Selection, select
from dsops_prebuilt._variant import Gpu, Libc, Simd, TorchBuild
from dsops_prebuilt.cli import main

ADAM = Request("cpu_adam", "cpu")
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def have(*artifacts: Artifact, faults: tuple[str, ...] = (), **changes: Any) -> Installed:
    manifest: Manifest = manifest_of(*artifacts, **{"label": "cu126", **changes})
    return Installed((Payload(manifest, Path("/p")),) if artifacts else (), faults)


def selected(found: Installed, host: Host, request: Request = ADAM) -> Selection:
    return select(found.offers, request, host)


JIT = "only DeepSpeed's own build can serve it"
INSTALL = f'Run: pip install "dsops-prebuilt[cu118]=={VERSION}"'
LISTED = (
    "No payload of this release fits; "
    "payloads with cpu_adam: cpu (torch 2.13, CPython 3.11), cu118 (torch 2.7, CPython 3.11)"
)
INDEX = "--index-url https://download.pytorch.org/whl/cu118"
OTHER = (SourceDigest("f" * 64, CLOSURE, ("0.18.1", "0.18.2")),)
SAME = (SourceDigest("f" * 64, CLOSURE, ("0.19.7", "0.19.8")),)
OLD_TORCH, EXACT_TORCH = torch_binding(minor="2.6"), torch_binding(exact="2.7.0a0+nv")
LINUX_ONLY = "There are binaries for Linux with glibc only, not for"
NOTHING = {"torch": None, "deepspeed": None, "csrc": None}
TORCH_CPU = TorchBuild("2.7.1+cpu", None, None, cxx11_abi=True)
TORCH_25 = TorchBuild("2.5.1+cpu", None, None, cxx11_abi=True)
CU118 = cuda_binding("11.8")
REINSTALL = "pip install --force-reinstall --no-deps deepspeed==0.19.8"
REMEDIES = [
    ("nothing installed", have(), host_of(), INSTALL),
    ("torch of the CPU payload", have(), host_of(torch=TorchBuild("2.13.0+cpu")), INSTALL.replace("cu118", "cpu")),
    ("no torch, no payload", have(), host_of(torch=None), "Run: pip install torch"),
    ("nothing, no payload", have(), host_of(**NOTHING), "Run: pip install torch deepspeed"),
    ("no torch", have(artifact_of()), host_of(torch=None), 'Run: pip install "torch==2.7.*"'),
    ("nothing but a payload", have(artifact_of()), host_of(**NOTHING), 'Run: pip install "torch==2.7.*" deepspeed'),
    ("no DeepSpeed", have(artifact_of()), host_of(deepspeed=None, csrc=None), "Run: pip install deepspeed"),
    ("another Python", have(), host_of(python="cp312"), LISTED),
    ("another torch", have(), host_of(torch=TORCH_25), LISTED),
    ("a torch that is no release", have(), host_of(torch=TorchBuild("2.7.0a0+nv")), LISTED),
    ("op not in the payload", have(fused_adam_of()), host_of(), INSTALL),
    ("op not in the fitting payload", have(fused_adam_of(), label="cu118"), host_of(), LISTED),
    ("unusable payload", have(faults=("/p: old; run: x",)), host_of(), "Repair what is installed: /p: old; run: x"),
    ("another payload, torch", have(artifact_of(torch=OLD_TORCH), label="cpu"), host_of(), INSTALL),
    ("torch", have(artifact_of()), host_of(torch=TORCH_25), 'Run: pip install "torch==2.7.*"'),
    ("exact torch", have(artifact_of(torch=EXACT_TORCH)), host_of(torch=TORCH_25), LISTED),
    ("python", have(artifact_of(python="cp39"), label="cu118"), host_of(), LISTED),
    ("sources", have(artifact_of(sources=OTHER)), host_of(), 'Run: pip install "deepspeed==0.18.2"'),
    ("changed sources", have(artifact_of(sources=SAME)), host_of(), f"Run: {REINSTALL}"),
    ("no sources", have(artifact_of()), host_of(csrc=None), f"Run: {REINSTALL}"),
    (
        "torch and sources",
        have(artifact_of(sources=OTHER)),
        host_of(torch=TORCH_25),
        'Run: pip install "torch==2.7.*" && pip install "deepspeed==0.18.2"',
    ),
    ("no release named", have(artifact_of(sources=()), label="cu118"), host_of(), LISTED),
    ("processor", have(artifact_of(simd=Simd.X86_64_V4)), host_of(), f"No other payload changes that; {JIT}"),
    (
        "DSOPS_SIMD",
        have(artifact_of()),
        host_of(simd=Simd.X86_64, native=Simd.X86_64_V4, settings={"DSOPS_SIMD": "x86_64"}),
        "Unset DSOPS_SIMD",
    ),
    ("musl", have(), host_of(libc=Libc("musl")), f"{LINUX_ONLY} musl; {JIT}"),
    ("macOS", have(), host_of(system="Darwin", libc=None), f"{LINUX_ONLY} Darwin; {JIT}"),
]
FUSED = Request("fused_adam", "cuda")
FUSED_LISTED = "No payload of this release fits; payloads with fused_adam: cu118 (torch 2.7, CPython 3.11)"
CUDA_REMEDIES = [
    ("CUDA 11.8", have(), FUSED, host_of(torch=TorchBuild("2.7.1+cu118", "11.8")), INSTALL),
    ("another CUDA", have(), FUSED, host_of(), FUSED_LISTED),
    (
        "CPU torch, no payload",
        have(),
        FUSED,
        host_of(torch=TORCH_CPU),
        f'fused_adam needs a CUDA build of torch. Run: pip install "torch==2.7.*" {INDEX}',
    ),
    (
        "CPU torch",
        have(fused_adam_of(cuda=CU118), label="cu118"),
        FUSED,
        host_of(torch=TORCH_CPU),
        f'Run: pip install "torch==2.7.*" {INDEX}',
    ),
    (
        "nothing but a payload",
        have(fused_adam_of(cuda=CU118), label="cu118"),
        FUSED,
        host_of(**NOTHING),
        f'Run: pip install "torch==2.7.*" {INDEX} && pip install deepspeed',
    ),
    (
        "not in this release",
        have(fused_adam_of()),
        Request("fused_lamb", "cuda"),
        host_of(),
        "this release has no payload with fused_lamb for cuda; DSOPS_ON_MISS=jit has DeepSpeed compile it",
    ),
    (
        "not in this release, no torch",
        have(),
        Request("fused_lamb", "cuda"),
        host_of(torch=None),
        "Run: pip install torch. But this release has no payload with fused_lamb for cuda; "
        "DSOPS_ON_MISS=jit has DeepSpeed compile it",
    ),
]


@pytest.mark.parametrize(
    ("found", "request_", "host", "next_step"),
    [row[1:] for row in CUDA_REMEDIES],
    ids=[row[0] for row in CUDA_REMEDIES],
)
def test_the_next_step_for_other_kernels(found: Installed, request_: Request, host: Host, next_step: str) -> None:
    assert remedy(selected(found, host, request_), host, found) == next_step


@pytest.mark.parametrize(
    ("found", "host", "next_step"), [row[1:] for row in REMEDIES], ids=[row[0] for row in REMEDIES]
)
def test_the_next_step(found: Installed, host: FakeHost, next_step: str) -> None:
    """Of the stock tier alone: where the portable one may serve, its remedies go first."""
    stock = replace(host, settings={**host.settings, "DSOPS_TIER": "stock"})
    assert remedy(selected(found, stock), stock, found) == next_step


def portable_of(*releases: str, **changes: Any) -> Artifact:
    """A portable cpu_adam of some DeepSpeed releases, whose sources are not the installed ones."""
    facts = {"file": f"{releases[0]}.so", "tier": "portable", "python": None, "torch": None, "simd": Simd.X86_64}
    return artifact_of(**{**facts, "sources": (SourceDigest("e" * 64, CLOSURE, releases),), **changes})


AGAIN = f"pip install --force-reinstall --no-deps dsops-prebuilt=={VERSION}"
WHEEL = f"The loader is installed without its binaries, and there is a wheel with them. Run: {AGAIN}"
TORCH_TOO = f"{JIT}, or plain torch: DSOPS_ON_MISS=reference"
OTHERS = "There are binaries for aarch64 with glibc 2.24 or x86_64 with glibc 2.24 or later only, not for"
COVERED = have(portable_of("0.14.4", "0.14.5"), portable_of("0.19.10", "0.19.8"), label="portable")
PORTABLE_REMEDIES = [
    ("the loader alone", have(), host_of(), WHEEL),
    ("a stock payload of another torch", have(artifact_of()), host_of(torch=TORCH_25), WHEEL),
    ("a stock payload of other sources", have(artifact_of(sources=OTHER)), host_of(), WHEEL),
    ("changed sources", have(artifact_of(sources=SAME)), host_of(), f"Run: {REINSTALL}"),
    ("no DeepSpeed", have(), host_of(deepspeed=None, csrc=None), "Run: pip install deepspeed"),
    ("no sources", have(portable_of("0.19.8"), label="portable"), host_of(csrc=None), f"Run: {REINSTALL}"),
    ("another machine", have(), host_of(machine="ppc64le"), f"{OTHERS} ppc64le with glibc 2.31; {TORCH_TOO}"),
    ("old glibc", have(), host_of(libc=Libc("glibc", (2, 17))), f"{OTHERS} x86_64 with glibc 2.17; {TORCH_TOO}"),
    ("no libc", have(), host_of(libc=None), f"{OTHERS} x86_64 with an unknown C library; {TORCH_TOO}"),
    (
        "old glibc, stock payload",
        have(artifact_of(glibc=(2, 28))),
        host_of(libc=Libc("glibc", (2, 17))),
        f"No other payload changes that; {TORCH_TOO}",
    ),
    ("musl", have(), host_of(libc=Libc("musl")), f"{LINUX_ONLY} musl; {TORCH_TOO}"),
    (
        "DSOPS_TIER=reference, no torch",
        have(),
        host_of(torch=None, settings={"DSOPS_TIER": "reference"}),
        "Unset DSOPS_TIER",
    ),
    ("DSOPS_TIER=portable", have(artifact_of()), host_of(settings={"DSOPS_TIER": "portable"}), "Unset DSOPS_TIER"),
    ("older sources", COVERED, host_of(deepspeed="0.14.3"), 'Run: pip install "deepspeed==0.19.10"'),
    ("unknown sources", COVERED, host_of(deepspeed=None), 'Run: pip install "deepspeed==0.19.10"'),
    (
        "newer sources",
        COVERED,
        host_of(deepspeed="0.20.0"),
        'Run: pip install "deepspeed==0.19.10", or see whether a later dsops-prebuilt has it: '
        "pip install --upgrade dsops-prebuilt",
    ),
    ("changed sources, portable", COVERED, host_of(), f"Run: {REINSTALL}"),
]


@pytest.mark.parametrize(
    ("found", "host", "next_step"), [row[1:] for row in PORTABLE_REMEDIES], ids=[row[0] for row in PORTABLE_REMEDIES]
)
def test_the_next_step_of_a_cpu_optimizer(found: Installed, host: Host, next_step: str) -> None:
    assert remedy(selected(found, host), host, found) == next_step


def test_a_digest_that_the_portable_tier_has_not_is_said_with_the_releases_that_it_has() -> None:
    host = host_of(deepspeed="0.20.0")
    assert headline(selected(COVERED, host), host, COVERED).startswith(
        "no prebuilt cpu_adam (cpu) can be loaded here: the portable tier has it for the sources of DeepSpeed 0.14.4 "
        "to 0.19.10 (4 releases), and the installed ones (0.20.0) are none of these. Run: "
    )
    one = have(portable_of("0.19.7"), label="portable")
    assert "for the sources of DeepSpeed 0.19.7, and the installed ones (0.19.8)" in headline(
        selected(one, host_of()), host_of(), one
    )


def test_the_headline_names_the_nearest_artifact() -> None:
    found = have(
        artifact_of(file="far.so", python="cp39", machine="aarch64"), artifact_of(file="near.so", python="cp312")
    )
    assert headline(selected(found, host_of()), host_of(), found) == (
        "no prebuilt cpu_adam (cpu) can be loaded here: nearest is cu126/near.so, but it is built for cp312, "
        f"and this interpreter is cp311. {WHEEL}"
    )


def test_another_kernel_of_the_name_is_never_the_nearest() -> None:
    """The portable tier always brings the CPU's ``fused_adam``."""
    other = portable_of("0.19.8", op="fused_adam", accelerators=("cpu",), sources=artifact_of().sources)
    found, host = have(other, fused_adam_of(python="cp39", torch=OLD_TORCH), label="cu118"), host_of(visible=())
    assert headline(selected(found, host, FUSED), host, found).startswith(
        "no prebuilt fused_adam (cuda) can be loaded here: nearest is cu118/fused_adam_op.so, but it is built for cp39, "
    )
    found = have(other, label="portable")
    assert headline(selected(found, host, FUSED), host, found).endswith(f"and cuda was asked for. {FUSED_LISTED}")


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
The reference tier, plain torch: not available: it has no fused_adam (cuda), only DeepSpeed's CPU optimizers
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


REFERENCE = "The reference tier, plain torch:"
BY_TIER = {"DSOPS_TIER": "reference"}


@pytest.mark.parametrize(
    ("op", "host", "line"),
    [
        ("cpu_adam", host_of(torch=None), "not available: torch is not installed or cannot be imported"),
        ("cpu_adam", host_of(settings={"DSOPS_TIER": "stock"}), "not available: DSOPS_TIER=stock is in force"),
        ("pin_memory", host_of(), "not available: it has no pin_memory (cpu), only DeepSpeed's CPU optimizers"),
    ],
)
def test_why_the_reference_is_not_available(op: str, host: Host, line: str) -> None:
    selection = selected(have(), host, Request(op, "cpu"))
    assert f"{REFERENCE} {line}" in text(selection, host, have()).splitlines()
    assert as_json(selection, host, have())["reference"] == {
        "available": False,
        "reason": line.removeprefix("not available: "),
    }


@pytest.mark.parametrize("settings", [BY_TIER, {"DSOPS_ON_MISS": "reference"}], ids=["tier", "on miss"])
def test_the_reference_is_chosen_where_the_settings_say_so(settings: dict[str, str]) -> None:
    found, host = have(artifact_of(python="cp39")), host_of(settings=settings)
    selection = selected(found, host)
    (line,) = (line for line in text(selection, host, found).splitlines() if line.startswith("Chosen: "))
    why = "DSOPS_TIER=reference is in force" if settings == BY_TIER else headline(selection, host, found)
    assert line == f"Chosen: reference, plain torch; {why}"
    said = as_json(selection, host, found)
    assert (said["chosen"], said["path"], said["reason"]) == ("reference", None, why)
    assert said["reference"] == {"available": True, "reason": None}
    assert ("tier" in [item["key"] for item in said["artifacts"][0]["rejections"]]) is (settings == BY_TIER)


@pytest.mark.parametrize(
    ("settings", "op", "code"),
    [
        (BY_TIER, "cpu_lion", 0),
        ({"DSOPS_ON_MISS": "reference"}, "cpu_lion", 0),
        (BY_TIER, "pin_memory", 5),
        ({"DSOPS_ON_MISS": "reference", "DSOPS_TIER": "stock"}, "cpu_lion", 5),
    ],
)
@pytest.mark.usefixtures("entry")
def test_explain_of_what_the_reference_serves_exits_with_0(settings: dict[str, str], op: str, code: int) -> None:
    assert main(["explain", op, "--accelerator", "cpu"], host_of(settings=settings)) == code


@pytest.mark.usefixtures("entry")
def test_a_wrong_tier_is_a_usage_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cpu_adam"], host_of(settings={"DSOPS_TIER": "portabel"})) == 2
    expected = "dsops: DSOPS_TIER=portabel: did you mean portable? accepted: stock, portable, reference\n"
    assert capsys.readouterr().err == expected


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"], host_of())
    said = capsys.readouterr().out
    assert "  DSOPS_TIER=stock|portable|reference " in said
    assert "  DSOPS_ON_MISS=auto|jit|error|reference " in said


def test_the_text_of_a_choice() -> None:
    found = have(artifact_of(), artifact_of(file="v4.so", simd=Simd.X86_64_V4), faults=("/q: bad",))
    assert text(selected(found, host_of()), host_of(), found).splitlines()[7:] == [
        "Chosen: cu126/cpu_adam_op.so",
        "  /p/cpu_adam_op.so",
        "Artifacts of cpu_adam (2), best first:",
        "  cu126/v4.so  [stock, x86_64_v4, build 1]  rejected",
        "    simd: it needs the SIMD level x86_64_v4, and this processor's is x86_64_v3",
        "  cu126/cpu_adam_op.so  [stock, x86_64_v3, build 1]  accepted",
        f"{REFERENCE} available; DSOPS_ON_MISS=reference takes it where nothing else fits, DSOPS_TIER=reference always",
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
    write_payload(entry, manifest_of(artifact_of(sha256=ABC)), {"cpu_adam_op.so": b"abc"})
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
    write_payload(entry, manifest_of(artifact_of(op="new_op", sha256=ABC)), {"cpu_adam_op.so": b"abc"})
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
    assert capsys.readouterr().out == (
        "No payload is installed. Run one of:\n"
        f"  {AGAIN}  for cpu_adagrad, cpu_adam, cpu_lion, fused_adam, fused_lion on the CPU, with any torch and any CPython\n"
        f'  pip install "dsops-prebuilt[cpu]=={VERSION}"  for torch 2.13, CPython 3.11\n'
        f'  pip install "dsops-prebuilt[cu118]=={VERSION}"  for torch 2.7, CPython 3.11\n'
    )


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
    assert (done.returncode, done.stderr[:40]) == (2, "dsops: DSOPS_SIMD=sse9: accepted: x86_64")


def test_the_nearest_of_what_dsops_simd_forbids_is_the_level_just_above() -> None:
    found = have(artifact_of(), artifact_of(file="v4.so", simd=Simd.X86_64_V4))
    host = host_of(simd=Simd.X86_64, native=Simd.X86_64_V4, settings={"DSOPS_SIMD": "x86_64"})
    assert headline(selected(found, host), host, found) == (
        "no prebuilt cpu_adam (cpu) can be loaded here: nearest is cu126/cpu_adam_op.so, but it needs the SIMD level "
        "x86_64_v3, and DSOPS_SIMD=x86_64 limits this process to x86_64. Unset DSOPS_SIMD"
    )


def test_settings_in_force_are_shown() -> None:
    found, host = have(artifact_of()), host_of(settings={"DSOPS_DISABLE": "1", "DSOPS_ON_MISS": "jit"})
    lines = text(selected(found, host), host, found).splitlines()
    assert "  settings  DSOPS_DISABLE=1 DSOPS_ON_MISS=jit" in lines
    assert any(line.startswith("DSOPS_DISABLE=1: training would not use it") for line in lines)
    said = as_json(selected(found, host), host, found)
    assert (said["settings"], said["reason"]) == ({"DSOPS_DISABLE": "1", "DSOPS_ON_MISS": "jit"}, None)
    nothing = as_json(selected(have(), host), host, have())
    assert nothing["reason"] == headline(selected(have(), host), host, have())


@pytest.mark.usefixtures("entry")
def test_explain_refuses_a_wrong_word_of_on_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cpu_adam"], host_of(settings={"DSOPS_ON_MISS": "jti"})) == 2
    assert (
        capsys.readouterr().err == "dsops: DSOPS_ON_MISS=jti: did you mean jit? accepted: auto, jit, error, reference\n"
    )


def test_explain_refuses_a_damaged_choice(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_payload(entry, manifest_of(artifact_of()), {"cpu_adam_op.so": b"abc"})
    assert main(["explain", "cpu_adam"], host_of()) == 4
    said = capsys.readouterr()
    assert said.err.startswith(f"dsops: {folder}/cpu_adam_op.so: its sha256 is {ABC}, and its manifest has {'0' * 64}")
    assert said.out == ""


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "dsops_prebuilt", "list", "--json"]
    with subprocess.Popen(
        command, env={"PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_path_that_the_terminal_cannot_show_is_shown_escaped(tmp_path: Path) -> None:
    entry = tmp_path / "\u00fc"
    write_payload(entry, manifest_of(artifact_of()), {})
    done = subprocess.run(
        [sys.executable, "-m", "dsops_prebuilt", "list"],
        env={"PYTHONPATH": f"{SRC}:{entry}", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/\\xfc/" in done.stdout
