"""Name the cause of a miss and the next step: one line, with the command where a command can help."""

from __future__ import annotations

import re
from typing import Any, List, Optional, Set, Tuple

from dsops_prebuilt import __version__
from dsops_prebuilt import _catalogue as catalogue
from dsops_prebuilt._catalogue import CPU_OPTIMIZERS, PAYLOADS, PLATFORMS
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import Installed
from dsops_prebuilt._manifest import PORTABLE, Artifact
from dsops_prebuilt._select import Request, Selection, Verdict, only_tier
from dsops_prebuilt._variant import CudaRelease

_PIP_CURES = {"torch", "cxx11_abi", "cuda", "sources"}
_FIXED = {"machine", "libc", "simd", "gpu"}
"""What no payload changes: all of a release are built for the same machines."""
_TORCH_INDEX = "https://download.pytorch.org/whl"


def headline(selection: Selection, host: Host, found: Installed) -> str:
    """Cause and remedy in one line."""
    near, covered = nearest(selection), _covered(selection, host)
    cause = f"no prebuilt {selection.request} can be loaded here"
    if covered:
        known = f"{covered[0]} to {covered[-1]} ({len(covered)} releases)" if covered[1:] else covered[0]
        cause = f"{cause}: the portable tier has it for the sources of DeepSpeed {known}, and the installed ones "
        cause = f"{cause}({host.deepspeed or 'of an unknown release'}) are none of these"
    elif near:
        first = near[0]
        cause = f"{cause}: nearest is {first.offer}, but {'; '.join(item.reason for item in first.rejections)}"
    elif found.payloads:
        cause = f"{cause}: no installed payload holds it"
    else:
        cause = f"{cause}: no payload is installed"
    return f"{cause}. {remedy(selection, host, found)}"


def remedy(selection: Selection, host: Host, found: Installed) -> str:
    """The next step, with the command where a command can help."""
    near = nearest(selection)
    failed = {item.key for item in near[0].rejections} if near else set()
    if host.system != "Linux" or (host.libc is not None and host.libc.kind != "glibc"):
        last = _last_resort(selection.request, host)
        return f"There are binaries for Linux with glibc only, not for {host.libc or host.system}; {last}"
    if "tier" in failed or only_tier(host) == "reference":
        return "Unset DSOPS_TIER"
    if found.faults and not near:
        return f"Repair what is installed: {found.faults[0]}"
    own, made = host.processor, near[0].offer.artifact if near else None
    if made and "simd" in failed and own is not None and made.simd.runs_on(own):
        return "Unset DSOPS_SIMD"
    step = _other_sources(_covered(selection, host), host) or _platform_wheel(selection, host, found)
    if step:
        return step
    if made is None or "accelerator" in failed:
        return _from_release(selection.request, host, found)
    commands = _commands(made, failed, host) if failed <= _PIP_CURES else []
    fitting = _fitting(selection.request, host, found)
    if fitting and not failed & (_FIXED | {"sources"}):
        return fitting
    if commands:
        return f"Run: {' && '.join(commands)}"
    if failed & _FIXED:
        return f"No other payload changes that; {_last_resort(selection.request, host)}"
    return _from_release(selection.request, host, found)


def _covered(selection: Selection, host: Host) -> Tuple[str, ...]:
    """The DeepSpeed releases of the portable tier, oldest first, where the installed sources are all that it lacks."""
    other = [item for item in selection.verdicts if {reason.key for reason in item.rejections} == {"sources"}]
    made = [item.offer.artifact for item in other if item.offer.artifact.tier == "portable"]
    releases = {release for one in made for source in one.sources for release in source.deepspeed}
    return () if host.csrc is None else tuple(sorted(releases, key=_order))


def _order(release: str) -> Tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)))


def _other_sources(covered: Tuple[str, ...], host: Host) -> str:
    """The next step where the portable tier is not made from the installed sources."""
    if not covered:
        return ""
    if host.deepspeed in covered:  # its files were changed
        return f"Run: pip install --force-reinstall --no-deps deepspeed=={host.deepspeed}"
    step = f'Run: pip install "deepspeed=={covered[-1]}"'
    if host.deepspeed is not None and _order(host.deepspeed) > _order(covered[-1]):
        return f"{step}, or see whether a later dsops-prebuilt has it: pip install --upgrade dsops-prebuilt"
    return step


def _platform_wheel(selection: Selection, host: Host, found: Installed) -> str:
    """The next step where the loader was installed without the portable tier that would hold the op."""
    request, there = selection.request, {payload.manifest.label for payload in found.payloads}
    if not _is_cpu_optimizer(request) or PORTABLE in there or only_tier(host) == "stock":
        return ""
    if host.csrc is None or any(_changed(item, host) for item in selection.verdicts):
        return ""  # the portable tier needs DeepSpeed's sources as they were released too
    if has_platform_wheel(host):
        command = f"pip install --force-reinstall --no-deps dsops-prebuilt=={__version__}"
        return f"The loader is installed without its binaries, and there is a wheel with them. Run: {command}"
    if selection.verdicts:
        return ""
    wheels = " or ".join(f"{machine} with glibc {'.'.join(map(str, least))}" for machine, least in PLATFORMS.items())
    here = f"{host.machine} with {host.libc or 'an unknown C library'}"
    return f"There are binaries for {wheels} or later only, not for {here}; {_last_resort(request, host)}"


def _changed(verdict: Verdict, host: Host) -> bool:
    """Whether the installed sources differ from those of their own release."""
    releases = {release for source in verdict.offer.artifact.sources for release in source.deepspeed}
    return any(item.key == "sources" for item in verdict.rejections) and host.deepspeed in releases


def has_platform_wheel(host: Host) -> bool:
    """Whether this release has a wheel of the loader with the portable tier for this machine."""
    least = PLATFORMS.get(host.machine or "")
    libc = host.libc.version if host.libc is not None and host.libc.kind == "glibc" else None
    return host.system == "Linux" and least is not None and libc is not None and libc >= least


def _is_cpu_optimizer(request: Request) -> bool:
    return request.accelerator in CPU_OPTIMIZERS.get(request.op, ())


def _last_resort(request: Request, host: Host) -> str:
    alone = "only DeepSpeed's own build can serve it"
    torch = _is_cpu_optimizer(request) and only_tier(host) is None
    return f"{alone}, or plain torch: DSOPS_ON_MISS=reference" if torch else alone


def _commands(made: Artifact, failed: Set[str], host: Host) -> List[str]:
    """The pip commands after which the artifact fits; none where no index has what it needs."""
    torch: List[str] = []
    if failed & {"torch", "cxx11_abi", "cuda"}:
        if made.torch is None or made.torch.exact is not None:
            return []
        torch = [_torch(made.torch.minor, None if made.cuda is None else str(made.cuda.toolkit))]
    if "sources" not in failed:
        return torch
    known = [release for source in made.sources for release in source.deepspeed]
    if host.deepspeed is None and host.csrc is None:
        # One command for both, unless torch comes from an index of its own, which has no DeepSpeed.
        return [f"{torch[0]} deepspeed"] if torch and made.cuda is None else [*torch, "pip install deepspeed"]
    if host.deepspeed is not None and (host.csrc is None or host.deepspeed in known):
        # The release is right and its files are not, so pip has to be told to unpack them again.
        return [*torch, f"pip install --force-reinstall --no-deps deepspeed=={host.deepspeed}"]
    return [*torch, f'pip install "deepspeed=={known[-1]}"'] if known else []


def _torch(minor: str, cuda: Optional[str]) -> str:
    index = f" --index-url {_TORCH_INDEX}/cu{cuda.replace('.', '')}" if cuda else ""
    return f'pip install "torch=={minor}.*"{index}'


def _from_release(request: Request, host: Host, found: Installed) -> str:
    """The next step where nothing that is installed is near: what of this release holds the op, if anything does."""
    absent = ["torch"] if host.torch is None else []
    absent += ["deepspeed"] if host.deepspeed is None and host.csrc is None else []
    first = f"Run: pip install {' '.join(absent)}" if absent else ""
    holders = _holders(request)
    if not holders and not (first and _is_cpu_optimizer(request)):
        none = f"this release has no payload with {request.op} for {request.accelerator}"
        return f"{first}{'. But ' if first else ''}{none}; DSOPS_ON_MISS=jit has DeepSpeed compile it"
    step = first or _fitting(request, host, found)
    if step:
        return step
    for item in holders:
        if item.cuda and _gpu_code(item, request) and host.torch and not host.torch.cuda and host.python in item.python:
            return f"{request.op} needs a CUDA build of torch. Run: {_torch(item.torch[-1], item.cuda)}"
    listed = ", ".join(f"{item.label} ({bound_to(item)})" for item in holders)
    return f"No payload of this release fits; payloads with {request.op}: {listed}"


def _holders(request: Request) -> List[catalogue.Payload]:
    return [item for item in PAYLOADS if request.accelerator in item.ops.get(request.op, ())]


def _fitting(request: Request, host: Host, found: Installed) -> str:
    """The command that installs a payload of this release that fits and is not installed; "" where there is none."""
    there = {payload.manifest.label for payload in found.payloads}
    labels = [item.label for item in _holders(request) if item.label not in there and _fits(item, request, host)]
    return f'Run: pip install "dsops-prebuilt[{labels[0]}]=={__version__}"' if labels else ""


def _gpu_code(payload: catalogue.Payload, request: Request) -> bool:
    """Whether the payload's artifact of the op is GPU code, which is bound to a CUDA release; a CPU op's is not."""
    return payload.ops[request.op] == ("cuda",)


def _fits(payload: catalogue.Payload, request: Request, host: Host) -> bool:
    torch = host.torch
    if torch is None or not torch.is_release or torch.minor not in payload.torch or host.python not in payload.python:
        return False
    if payload.cuda is None or not _gpu_code(payload, request):
        return True
    needs = CudaRelease.parse(payload.cuda)
    has = CudaRelease.parse(torch.cuda) if torch.cuda else None
    return has is not None and has.major == needs.major and has >= needs


def bound_to(payload: catalogue.Payload) -> str:
    """What a payload of this release is for, in words: ``torch 2.7, CPython 3.11``."""
    pythons = " or ".join(f"{tag[2]}.{tag[3:]}" for tag in payload.python)
    return f"torch {' or '.join(payload.torch)}, CPython {pythons}"


def nearest(selection: Selection) -> List[Verdict]:
    """The asked for kernel before another of its name, then fewest failing keys; of too high levels the lowest."""
    return sorted(selection.verdicts, key=_distance)


def _distance(verdict: Verdict) -> Tuple[Any, ...]:
    keys = {item.key for item in verdict.rejections}
    above = verdict.offer.artifact.simd.rank if "simd" in keys else 0
    return "accelerator" in keys, len(keys), above, verdict.offer.preference
