"""Decide, as a pure function of request, host and artifacts, which artifact may be loaded, and why no other may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, Iterable, Optional, Sequence, Tuple

from dsops_prebuilt._errors import UsageError, one_of
from dsops_prebuilt._host import Host
from dsops_prebuilt._manifest import TIERS, Artifact, CudaBinding
from dsops_prebuilt._variant import CudaRelease, Gpu

ON_MISS = ("auto", "jit", "error", "reference")
"""The words of ``DSOPS_ON_MISS``, the default first."""
_LISTED = 4


@dataclass(frozen=True)
class Request:
    """An op by its builder's ``NAME``, and the accelerator whose kernel is wanted: ``cuda``, ``cpu``, ..."""

    op: str
    accelerator: str

    def __str__(self) -> str:
        return f"{self.op} ({self.accelerator})"


@dataclass(frozen=True)
class Offer:
    """An artifact of an installed payload: the payload's label and build number, and the folder of its files."""

    artifact: Artifact
    label: str
    build: int
    folder: str

    def __str__(self) -> str:
        return f"{self.label}/{self.artifact.file}"

    @property
    def preference(self) -> Tuple[int, int, int, str, str, str]:
        """The ranking, smallest first and total, as no two offers are one file.

        Highest SIMD level; then stock before portable; then the later build; then, only so that the answer is always
        the same, label, file and folder. The reference has no artifact, and comes after them all.
        """
        made = self.artifact
        return (-made.simd.rank, TIERS.index(made.tier), -self.build, self.label, made.file, self.folder)


@dataclass(frozen=True)
class Rejection:
    """One key of :data:`KEYS` on which an artifact fails, and why, in one sentence without a final stop."""

    key: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """An offer and every key on which it fails; accepted when there is none."""

    offer: Offer
    rejections: Tuple[Rejection, ...]

    @property
    def accepted(self) -> bool:
        return not self.rejections


@dataclass(frozen=True)
class Selection:
    """The answer to a request: the offer to load, or None, and the verdict on every offer of that op, best first."""

    request: Request
    chosen: Optional[Offer]
    verdicts: Tuple[Verdict, ...]


def judge(
    artifact: Artifact, request: Request, host: Host, keys: Optional[Sequence[str]] = None
) -> Tuple[Rejection, ...]:
    """Each of ``keys``, by default all of :data:`KEYS`, on which the artifact may not be loaded, in that order."""
    reasons = ((key, KEYS[key](artifact, request, host)) for key in (KEYS if keys is None else keys))
    return tuple(Rejection(key, reason) for key, reason in reasons if reason is not None)


def select(offers: Iterable[Offer], request: Request, host: Host) -> Selection:
    """Judge every offer of the requested op, and choose the accepted one that :attr:`Offer.preference` puts first."""
    of_op = sorted((offer for offer in offers if offer.artifact.op == request.op), key=lambda offer: offer.preference)
    verdicts = tuple(Verdict(offer, judge(offer.artifact, request, host)) for offer in of_op)
    return Selection(request, next((item.offer for item in verdicts if item.accepted), None), verdicts)


def may_serve(offers: Iterable[Offer], request: Request, host: Host) -> bool:
    """Whether an offer passes every key that costs nothing: no GPU is asked and no file is hashed."""
    return any(not judge(offer.artifact, request, host, CHEAP) for offer in offers if offer.artifact.op == request.op)


def default_accelerator(host: Host) -> str:
    """``DS_ACCELERATOR``, else ``cuda`` for a CUDA torch and a GPU, else ``cpu``, as real_accelerator.py (0.19.8)."""
    cuda = host.torch is not None and host.torch.cuda is not None and host.gpus()
    return host.setting("DS_ACCELERATOR") or ("cuda" if cuda else "cpu")


def on_miss(host: Host) -> str:
    """The word of ``DSOPS_ON_MISS``. Raises :class:`UsageError` for one that is none of :data:`ON_MISS`."""
    return _setting("DSOPS_ON_MISS", ON_MISS, host) or ON_MISS[0]


def only_tier(host: Host) -> Optional[str]:
    """The tier that ``DSOPS_TIER`` restricts the choice to. Raises :class:`UsageError` for a word that is no tier."""
    return _setting("DSOPS_TIER", TIERS, host)


def _setting(name: str, words: Tuple[str, ...], host: Host) -> Optional[str]:
    word = host.setting(name)
    if word is not None and word not in words:
        raise UsageError(f"{name}={word}: {one_of(word, words)}")
    return word


def _op(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    return None if artifact.op == request.op else f"it holds {artifact.op}, not {request.op}"


def _accelerator(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    reason = f"its kernel is for {' and '.join(artifact.accelerators)}, and {request.accelerator} was asked for"
    return None if request.accelerator in artifact.accelerators else reason


def _tier(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    tier = only_tier(host)
    return None if tier in (None, artifact.tier) else f"its tier is {artifact.tier}, and DSOPS_TIER={tier} is in force"


def _python(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    reason = f"it is built for {artifact.python}, and this interpreter is {host.python or 'of an unknown kind'}"
    return None if artifact.python is None or artifact.python == host.python else reason


def _machine(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    reason = f"it is built for {artifact.machine}, and this machine is {host.machine or 'of an unknown kind'}"
    return None if artifact.machine == host.machine else reason


def _libc(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    needs = f"it needs Linux with glibc {artifact.glibc[0]}.{artifact.glibc[1]} or later"
    if host.system != "Linux":
        return f"{needs}, and this system is {host.system or 'unknown'}"
    libc = host.libc
    if libc is None or (libc.kind == "glibc" and libc.version is None):
        return f"{needs}, and this machine's C library is unknown"
    if libc.kind != "glibc" or libc.version is None or libc.version < artifact.glibc:
        return f"{needs}, and this machine has {libc}"
    return None


def _simd(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    needs, level, own = f"it needs the SIMD level {artifact.simd}", host.simd, host.processor
    if level is not None and artifact.simd.runs_on(level):
        return None
    if own is not None and artifact.simd.runs_on(own):
        return f"{needs}, and DSOPS_SIMD={level} limits this process to {level}"
    return f"{needs}, and this processor's is {own or 'unknown'}"


def _torch(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    needs = artifact.torch
    if needs is None:
        return None
    if host.torch is None:
        return f"it needs torch {needs.exact or needs.minor}, and torch is not installed or cannot be imported"
    version = host.torch.version
    if needs.exact is not None:
        return None if needs.exact == version else f"it needs exactly torch {needs.exact}, and this is {version}"
    if not host.torch.is_release:
        return f"it is built for releases of torch {needs.minor}, and this torch ({version}) is not a release"
    return None if needs.minor == host.torch.minor else f"it needs torch {needs.minor}, and this is {version}"


def _cxx11_abi(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    if artifact.torch is None:
        return None
    found = None if host.torch is None else host.torch.cxx11_abi
    if found is None:
        return f"it needs a torch with C++11 ABI {int(artifact.torch.cxx11_abi)}, and this torch's is unknown"
    if found is artifact.torch.cxx11_abi:
        return None
    return f"it needs a torch with C++11 ABI {int(artifact.torch.cxx11_abi)}, and this torch has ABI {int(found)}"


def _cuda(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    if artifact.cuda is None:
        return None
    toolkit = artifact.cuda.toolkit
    needs = f"it needs a torch with CUDA {toolkit} or a later {toolkit.major}.x"
    if host.torch is None:
        return f"{needs}, and torch is not installed or cannot be imported"
    if host.torch.cuda is None:
        return f"{needs}, and this torch is built {'for ROCm' if host.torch.hip else 'without CUDA'}"
    runtime = CudaRelease.parse(host.torch.cuda)
    fits = runtime.major == toolkit.major and runtime >= toolkit
    return None if fits else f"{needs}, and this torch brings CUDA {runtime}"


def _sources(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    if host.csrc is None:
        return "DeepSpeed's sources (deepspeed/ops/csrc) are not installed, so nothing proves that it is made from them"
    if any(host.closure_digest(source.closure) == source.sha256 for source in artifact.sources):
        return None
    known = [release for source in artifact.sources for release in source.deepspeed]
    listed = ", ".join(known if len(known) <= _LISTED else [*known[:2], "...", known[-1]]) or "(none)"
    return f"it is made from the sources of DeepSpeed {listed}, and the installed ones ({host.deepspeed}) differ"


def _gpu(artifact: Artifact, request: Request, host: Host) -> Optional[str]:
    if artifact.cuda is None:
        return None
    if host.tegra:
        return "this is an NVIDIA Jetson, whose CUDA is not the one it is built for"
    gpus = host.gpus()
    if gpus is None:
        return "the GPUs of this machine cannot be asked (libnvidia-ml.so.1 does not answer)"
    if not gpus:
        return "no NVIDIA GPU is visible to this process"
    reasons = (_device(artifact.cuda, gpu, host.driver) for gpu in gpus)
    return next((reason for reason in reasons if reason is not None), None)


def _device(code: CudaBinding, gpu: Gpu, driver: Optional[CudaRelease]) -> Optional[str]:
    if any(gpu.runs(arch) for arch in code.sass):
        return None
    if not any(gpu.compiles(arch) for arch in code.ptx):
        holds = [f"sm_{arch.number}" for arch in code.sass] + [f"compute_{arch.number}" for arch in code.ptx]
        return f"it holds code for {', '.join(holds)}, and none of it runs on {gpu}"
    if driver is None or driver < code.toolkit:
        needs = f"{gpu} can use only its PTX, which needs a driver for CUDA {code.toolkit} or later"
        return f"{needs}, and this one is {f'for CUDA {driver}' if driver else 'unknown'}"
    return None


KEYS: Dict[str, Callable[[Artifact, Request, Host], Optional[str]]] = {
    "op": _op,
    "accelerator": _accelerator,
    "tier": _tier,
    "python": _python,
    "machine": _machine,
    "libc": _libc,
    "simd": _simd,
    "torch": _torch,
    "cxx11_abi": _cxx11_abi,
    "cuda": _cuda,
    "sources": _sources,
    "gpu": _gpu,
}
"""Every key that binds, in the order in which reasons are given: what was asked, the machine, torch, DeepSpeed, GPU."""

CHEAP = tuple(key for key in KEYS if key not in ("sources", "gpu"))
"""The keys that read no file and ask no device."""
