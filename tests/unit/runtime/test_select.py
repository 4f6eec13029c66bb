from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.runtime.fakes import (
    CLOSURE,
    FakeHost,
    artifact_of,
    cuda_binding,
    fused_adam_of,
    host_of,
    offer_of,
    torch_binding,
)

from dsops_prebuilt._errors import UsageError
from dsops_prebuilt._host import Host
from dsops_prebuilt._manifest import TIERS, Artifact, SourceDigest
from dsops_prebuilt._select import (
    CHEAP,
    KEYS,
    Offer,
    Request,
    default_accelerator,
    judge,
    may_serve,
    on_miss,
    only_tier,
    select,
)
from dsops_prebuilt._variant import CudaRelease, Gpu, Libc, Simd, TorchBuild

ADAM = Request("cpu_adam", "cpu")
FUSED = Request("fused_adam", "cuda")
A100, H100, T4 = Gpu("GPU-a", 8, 0), Gpu("GPU-h", 9, 0), Gpu("GPU-t", 7, 5)


def torch(version: str, cuda: str | None = "12.6", **facts: Any) -> TorchBuild:
    return replace(TorchBuild(version, cuda, None, cxx11_abi=True), **facts)


REJECTED: list[tuple[str, Artifact, Request, Host, str]] = [
    ("op", artifact_of(), Request("cpu_lion", "cpu"), host_of(), "it holds cpu_adam, not cpu_lion"),
    (
        "accelerator",
        artifact_of(),
        Request("cpu_adam", "xpu"),
        host_of(),
        "its kernel is for cpu and cuda, and xpu was asked for",
    ),
    (
        "accelerator",
        fused_adam_of(),
        Request("fused_adam", "cpu"),
        host_of(),
        "its kernel is for cuda, and cpu was asked for",
    ),
    (
        "tier",
        artifact_of(),
        ADAM,
        host_of(settings={"DSOPS_TIER": "portable"}),
        "its tier is stock, and DSOPS_TIER=portable is in force",
    ),
    (
        "tier",
        artifact_of(tier="portable"),
        ADAM,
        host_of(settings={"DSOPS_TIER": "reference"}),
        "its tier is portable, and DSOPS_TIER=reference is in force",
    ),
    ("python", artifact_of(), ADAM, host_of(python="cp312"), "it is built for cp311, and this interpreter is cp312"),
    ("python", artifact_of(), ADAM, host_of(python="cp311t"), "it is built for cp311, and this interpreter is cp311t"),
    (
        "python",
        artifact_of(),
        ADAM,
        host_of(python=None),
        "it is built for cp311, and this interpreter is of an unknown kind",
    ),
    ("machine", artifact_of(machine="aarch64"), ADAM, host_of(), "it is built for aarch64, and this machine is x86_64"),
    (
        "machine",
        artifact_of(),
        ADAM,
        host_of(machine=None),
        "it is built for x86_64, and this machine is of an unknown kind",
    ),
    (
        "libc",
        artifact_of(glibc=(2, 34)),
        ADAM,
        host_of(),
        "it needs Linux with glibc 2.34 or later, and this machine has glibc 2.31",
    ),
    (
        "libc",
        artifact_of(glibc=(2, 4)),
        ADAM,
        host_of(libc=Libc("musl")),
        "it needs Linux with glibc 2.4 or later, and this machine has musl",
    ),
    (
        "libc",
        artifact_of(),
        ADAM,
        host_of(libc=None),
        "it needs Linux with glibc 2.17 or later, and this machine's C library is unknown",
    ),
    (
        "libc",
        artifact_of(),
        ADAM,
        host_of(libc=Libc("glibc")),
        "it needs Linux with glibc 2.17 or later, and this machine's C library is unknown",
    ),
    (
        "libc",
        artifact_of(),
        ADAM,
        host_of(system="Windows", libc=None),
        "it needs Linux with glibc 2.17 or later, and this system is Windows",
    ),
    (
        "libc",
        artifact_of(),
        ADAM,
        host_of(system=None),
        "it needs Linux with glibc 2.17 or later, and this system is unknown",
    ),
    (
        "simd",
        artifact_of(simd=Simd.X86_64_V4),
        ADAM,
        host_of(),
        "it needs the SIMD level x86_64_v4, and this processor's is x86_64_v3",
    ),
    (
        "simd",
        artifact_of(simd=Simd.X86_64),
        ADAM,
        host_of(simd=None),
        "it needs the SIMD level x86_64, and this processor's is unknown",
    ),
    ("torch", artifact_of(), ADAM, host_of(torch=torch("2.8.0+cu126")), "it needs torch 2.7, and this is 2.8.0+cu126"),
    (
        "torch",
        artifact_of(torch=torch_binding(minor="2.1")),
        ADAM,
        host_of(torch=torch("2.10.0")),
        "it needs torch 2.1, and this is 2.10.0",
    ),
    (
        "torch",
        artifact_of(torch=torch_binding(minor="2.5")),
        ADAM,
        host_of(torch=torch("2.5.0a0+872d972e41.nv24.08")),
        "it is built for releases of torch 2.5, and this torch (2.5.0a0+872d972e41.nv24.08) is not a release",
    ),
    (
        "torch",
        artifact_of(torch=torch_binding(exact="2.7.0a0+nv1")),
        ADAM,
        host_of(torch=torch("2.7.0a0+nv2")),
        "it needs exactly torch 2.7.0a0+nv1, and this is 2.7.0a0+nv2",
    ),
    (
        "cxx11_abi",
        artifact_of(),
        ADAM,
        host_of(torch=torch("2.7.1", cxx11_abi=False)),
        "it needs a torch with C++11 ABI 1, and this torch has ABI 0",
    ),
    (
        "cxx11_abi",
        artifact_of(),
        ADAM,
        host_of(torch=torch("2.7.1", cxx11_abi=None)),
        "it needs a torch with C++11 ABI 1, and this torch's is unknown",
    ),
    (
        "cuda",
        fused_adam_of(),
        FUSED,
        host_of(torch=torch("2.7.1+cpu", None)),
        "it needs a torch with CUDA 12.6 or a later 12.x, and this torch is built without CUDA",
    ),
    (
        "cuda",
        fused_adam_of(),
        FUSED,
        host_of(torch=torch("2.7.1", None, hip="6.3")),
        "it needs a torch with CUDA 12.6 or a later 12.x, and this torch is built for ROCm",
    ),
    (
        "cuda",
        fused_adam_of(),
        FUSED,
        host_of(torch=torch("2.7.1+cu118", "11.8")),
        "it needs a torch with CUDA 12.6 or a later 12.x, and this torch brings CUDA 11.8",
    ),
    (
        "cuda",
        fused_adam_of(),
        FUSED,
        host_of(torch=torch("2.7.1+cu124", "12.4")),
        "it needs a torch with CUDA 12.6 or a later 12.x, and this torch brings CUDA 12.4",
    ),
    (
        "cuda",
        fused_adam_of(),
        FUSED,
        host_of(torch=torch("2.7.1+cu130", "13.0")),
        "it needs a torch with CUDA 12.6 or a later 12.x, and this torch brings CUDA 13.0",
    ),
    (
        "sources",
        artifact_of(),
        ADAM,
        host_of(csrc=None),
        "DeepSpeed's sources (deepspeed/ops/csrc) are not installed, so nothing proves that it is made from them",
    ),
    (
        "sources",
        artifact_of(),
        ADAM,
        host_of(digests={CLOSURE: "e" * 64}),
        "it is made from the sources of DeepSpeed 0.19.7, 0.19.8, and the installed ones (0.19.8) differ",
    ),
    (
        "sources",
        artifact_of(),
        ADAM,
        host_of(digests={}),
        "it is made from the sources of DeepSpeed 0.19.7, 0.19.8, and the installed ones (0.19.8) differ",
    ),
    (
        "sources",
        artifact_of(
            sources=(
                SourceDigest("f" * 64, CLOSURE, ("0.14.4", "0.14.5", "0.15.0")),
                SourceDigest("a" * 64, CLOSURE, ("0.15.1", "0.15.2")),
            )
        ),
        ADAM,
        host_of(),
        "it is made from the sources of DeepSpeed 0.14.4, 0.14.5, ..., 0.15.2, and the installed ones (0.19.8) differ",
    ),
    (
        "sources",
        artifact_of(sources=()),
        ADAM,
        host_of(),
        "it is made from the sources of DeepSpeed (none), and the installed ones (0.19.8) differ",
    ),
    ("gpu", fused_adam_of(), FUSED, host_of(visible=()), "no NVIDIA GPU is visible to this process"),
    (
        "gpu",
        fused_adam_of(),
        FUSED,
        host_of(visible=None),
        "the GPUs of this machine cannot be asked (libnvidia-ml.so.1 does not answer)",
    ),
    (
        "gpu",
        fused_adam_of(),
        FUSED,
        host_of(tegra=True),
        "this is an NVIDIA Jetson, whose CUDA is not the one it is built for",
    ),
    (
        "gpu",
        fused_adam_of(),
        FUSED,
        host_of(visible=(A100, T4)),
        "it holds code for sm_80, sm_90, and none of it runs on GPU-t (compute capability 7.5)",
    ),
    (
        "gpu",
        fused_adam_of(cuda=cuda_binding(sass=("9.0a",), ptx=("9.0a",))),
        FUSED,
        host_of(visible=(Gpu("GPU-b", 10, 0),)),
        "it holds code for sm_90a, compute_90a, and none of it runs on GPU-b (compute capability 10.0)",
    ),
    (
        "gpu",
        fused_adam_of(cuda=cuda_binding(sass=(), ptx=("8.0",))),
        FUSED,
        host_of(driver=CudaRelease(12, 4)),
        "GPU-a100 (compute capability 8.0) can use only its PTX, which needs a driver for CUDA 12.6 or later, and this one is for CUDA 12.4",
    ),
    (
        "gpu",
        fused_adam_of(cuda=cuda_binding(sass=(), ptx=("8.0",))),
        FUSED,
        host_of(driver=None),
        "GPU-a100 (compute capability 8.0) can use only its PTX, which needs a driver for CUDA 12.6 or later, and this one is unknown",
    ),
]


@pytest.mark.parametrize(
    ("key", "made", "request_", "host", "reason"), REJECTED, ids=[f"{n}-{row[0]}" for n, row in enumerate(REJECTED)]
)
def test_one_failing_key_is_one_reason(key: str, made: Artifact, request_: Request, host: Host, reason: str) -> None:
    assert [(item.key, item.reason) for item in judge(made, request_, host)] == [(key, reason)]


def test_every_key_has_a_row_in_the_table_above() -> None:
    assert {row[0] for row in REJECTED} == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_not_asked_does_not_count(key: str) -> None:
    made, request, host = next(row[1:4] for row in REJECTED if row[0] == key)
    assert judge(made, request, host, [name for name in KEYS if name != key]) == ()


ACCEPTED: list[tuple[str, Artifact, Request, Host]] = [
    ("as it is", artifact_of(), ADAM, host_of()),
    ("cpu_adam in a CUDA run", artifact_of(), Request("cpu_adam", "cuda"), host_of()),
    (
        "portable, any python and torch",
        artifact_of(python=None, torch=None, tier="portable"),
        ADAM,
        host_of(python="cp314t", torch=None),
    ),
    (
        "a CPU op asks no GPU and no CUDA",
        artifact_of(),
        ADAM,
        host_of(visible=None, tegra=True, torch=torch("2.7.1", None)),
    ),
    ("exact build", artifact_of(torch=torch_binding(exact="2.7.0a0+nv")), ADAM, host_of(torch=torch("2.7.0a0+nv"))),
    ("glibc equal", artifact_of(glibc=(2, 31)), ADAM, host_of()),
    ("glibc 2.9 is older than 2.31", artifact_of(glibc=(2, 9)), ADAM, host_of()),
    ("lower SIMD level", artifact_of(simd=Simd.X86_64), ADAM, host_of(simd=Simd.X86_64_V4)),
    (
        "second digest",
        artifact_of(sources=(SourceDigest("e" * 64, CLOSURE, ("0.1",)), *artifact_of().sources)),
        ADAM,
        host_of(),
    ),
    ("GPU", fused_adam_of(), FUSED, host_of()),
    ("all GPUs", fused_adam_of(), FUSED, host_of(visible=(A100, Gpu("GPU-3", 8, 9), H100))),
    ("torch's CUDA is later", fused_adam_of(), FUSED, host_of(torch=torch("2.7.1+cu129", "12.9"))),
    ("PTX", fused_adam_of(cuda=cuda_binding(ptx=("9.0",))), FUSED, host_of(visible=(A100, Gpu("GPU-n", 12, 0)))),
    (
        "PTX, driver equal",
        fused_adam_of(cuda=cuda_binding(sass=(), ptx=("8.0",))),
        FUSED,
        host_of(driver=CudaRelease(12, 6)),
    ),
    ("SASS asks no driver", fused_adam_of(), FUSED, host_of(driver=None)),
    ("family code", fused_adam_of(cuda=cuda_binding(sass=("10.0f",))), FUSED, host_of(visible=(Gpu("GPU-b", 10, 3),))),
]


@pytest.mark.parametrize(("made", "request_", "host"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_what_fits_is_accepted(made: Artifact, request_: Request, host: Host) -> None:
    assert judge(made, request_, host) == ()


def test_all_reasons_are_given_in_the_order_of_the_keys() -> None:
    nothing = FakeHost(None, None, None, None, None, None, None, None, None, tegra=False, visible=None)
    nothing.settings["DSOPS_TIER"] = "portable"
    failed = [item.key for item in judge(fused_adam_of(), Request("x", "y"), nothing)]
    assert failed == list(KEYS)


def test_an_unknown_fact_never_fits() -> None:
    for name in ("python", "system", "machine", "libc", "simd", "torch", "csrc", "visible"):
        assert judge(fused_adam_of(), FUSED, host_of(**{name: None})), name


class AskedNothing(FakeHost):
    """A host that fails when a GPU is asked or a file is hashed."""

    def gpus(self) -> tuple[Gpu, ...] | None:
        raise AssertionError("a GPU was asked")

    def closure_digest(self, closure: tuple[str, ...]) -> str | None:
        raise AssertionError(f"a file was hashed: {closure}")


def test_the_cheap_answer_asks_no_gpu_and_hashes_nothing() -> None:
    assert may_serve([offer_of(fused_adam_of())], FUSED, AskedNothing())
    assert not may_serve([offer_of(fused_adam_of(python="cp39"))], FUSED, AskedNothing())
    assert not may_serve([offer_of(artifact_of())], FUSED, AskedNothing())
    assert set(KEYS) - set(CHEAP) == {"sources", "gpu"}


def test_selection_lists_every_artifact_of_the_op_best_first_and_no_other() -> None:
    best, worse = offer_of(), offer_of(artifact_of(file="b.so", simd=Simd.X86_64))
    rejected = offer_of(artifact_of(file="c.so", simd=Simd.X86_64_V4))
    selection = select([worse, offer_of(fused_adam_of()), rejected, best], ADAM, host_of())
    assert selection.request == ADAM
    assert selection.chosen == best
    assert [(item.offer, item.accepted) for item in selection.verdicts] == [
        (rejected, False),
        (best, True),
        (worse, True),
    ]


def test_where_none_fits_none_is_chosen() -> None:
    assert select([offer_of(artifact_of(python="cp39"))], ADAM, host_of()).chosen is None
    assert select([], ADAM, host_of()).verdicts == ()


RANKED = [
    offer_of(artifact_of(simd=Simd.X86_64_V4, tier="portable")),
    offer_of(artifact_of(), build=2),
    offer_of(artifact_of(), build=1, label="a"),
    offer_of(artifact_of(file="a.so"), build=1, label="b"),
    offer_of(artifact_of(file="b.so"), build=1, label="b", folder="/1"),
    offer_of(artifact_of(file="b.so"), build=1, label="b", folder="/2"),
    offer_of(artifact_of(tier="portable"), build=9, label="0"),
    offer_of(artifact_of(simd=Simd.X86_64), build=9, label="0"),
]


def test_the_ranking_in_one_list() -> None:
    host = host_of(simd=Simd.X86_64_V4)
    assert [item.offer for item in select(reversed(RANKED), ADAM, host).verdicts] == RANKED


offers = st.builds(
    lambda simd, tier, build, label, file, folder: offer_of(
        artifact_of(simd=simd, tier=tier, file=file), label, build, folder
    ),
    st.sampled_from([Simd.X86_64, Simd.X86_64_V3, Simd.X86_64_V4]),
    st.sampled_from(TIERS[:2]),
    st.integers(1, 3),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["x.so", "y.so"]),
    st.sampled_from(["/1", "/2"]),
)


@given(st.lists(offers, unique_by=lambda offer: (offer.folder, offer.artifact.file)), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_offers(found: list[Offer], random: Any) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert select(found, ADAM, host_of()) == select(shuffled, ADAM, host_of())
    assert len({offer.preference for offer in found}) == len(found)


def test_the_words_of_the_settings() -> None:
    assert (on_miss(host_of()), only_tier(host_of())) == ("auto", None)
    host = host_of(settings={"DSOPS_ON_MISS": "reference", "DSOPS_TIER": "stock"})
    assert (on_miss(host), only_tier(host)) == ("reference", "stock")
    host = host_of(settings={"DSOPS_ON_MISS": "always", "DSOPS_TIER": "Stock"})
    with pytest.raises(UsageError, match=r"^DSOPS_ON_MISS=always: accepted: auto, jit, error, reference$"):
        on_miss(host)
    with pytest.raises(
        UsageError, match=r"^DSOPS_TIER=Stock: did you mean stock\? accepted: stock, portable, reference$"
    ):
        judge(artifact_of(), ADAM, host)


@pytest.mark.parametrize(
    ("host", "accelerator"),
    [
        (host_of(), "cuda"),
        (host_of(visible=()), "cpu"),
        (host_of(visible=None), "cpu"),
        (host_of(torch=None), "cpu"),
        (host_of(torch=torch("2.7.1+cpu", None)), "cpu"),
        (host_of(settings={"DS_ACCELERATOR": "xpu"}), "xpu"),
    ],
)
def test_default_accelerator(host: Host, accelerator: str) -> None:
    assert default_accelerator(host) == accelerator
