"""Put a selection into words: the one-screen answer to a miss, the text of ``dsops explain``, and its JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set, Tuple

from dsops_prebuilt import __version__
from dsops_prebuilt import _catalogue as catalogue
from dsops_prebuilt._catalogue import PAYLOADS
from dsops_prebuilt._errors import NoArtifactError
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import Installed
from dsops_prebuilt._manifest import Artifact
from dsops_prebuilt._select import Request, Selection, Verdict
from dsops_prebuilt._variant import CudaRelease

_SHOWN = 5
_SETTINGS = ("DSOPS_DISABLE", "DSOPS_ON_MISS", "DSOPS_SIMD")
_PIP_CURES = {"torch", "cxx11_abi", "cuda", "sources"}
_FIXED = {"machine", "libc", "simd", "gpu"}
"""What no payload changes: all of a release are built for the same machines."""
_TORCH_INDEX = "https://download.pytorch.org/whl"
_JIT = "only DeepSpeed's own build can serve it"


def miss(selection: Selection, host: Host, found: Installed, obstacles: Tuple[str, ...] = ()) -> NoArtifactError:
    """The error of a request that nothing serves; ``obstacles`` is what DeepSpeed's own build would lack.

    Cause and remedy are the first line, because other programs show only that one when they wrap the error.
    """
    near = _nearest(selection)
    lines = [headline(selection, host, found), "", f"Asked for: {selection.request}", *_facts(host)]
    lines += [f"Artifacts of {selection.request.op} that are installed ({len(near)}):" if near else _nothing(found)]
    for verdict in near[:_SHOWN]:
        lines += _verdict(verdict)
    if len(near) > _SHOWN:
        lines.append(f"  and {len(near) - _SHOWN} more: dsops explain {selection.request.op}")
    lines += [f"Unusable: {fault}" for fault in found.faults]
    if obstacles:
        lines.append(f"DeepSpeed cannot compile it here either; this machine lacks {'; '.join(obstacles)}")
    lines += [
        "To see every reason:",
        f"  dsops explain {selection.request.op} --accelerator {selection.request.accelerator}",
    ]
    return NoArtifactError("\n".join(lines))


def headline(selection: Selection, host: Host, found: Installed) -> str:
    """Cause and remedy in one line."""
    near = _nearest(selection)
    cause = f"no prebuilt {selection.request} can be loaded here"
    if near:
        first = near[0]
        cause = f"{cause}: nearest is {first.offer}, but {'; '.join(item.reason for item in first.rejections)}"
    elif found.payloads:
        cause = f"{cause}: no installed payload holds it"
    else:
        cause = f"{cause}: no payload is installed"
    return f"{cause}. {remedy(selection, host, found)}"


def remedy(selection: Selection, host: Host, found: Installed) -> str:
    """The next step, with the command where a command can help."""
    near = _nearest(selection)
    failed = {item.key for item in near[0].rejections} if near else set()
    if host.system != "Linux" or (host.libc is not None and host.libc.kind != "glibc"):
        return f"There are binaries for Linux with glibc only, not for {host.libc or host.system}; {_JIT}"
    if found.faults and not near:
        return f"Repair what is installed: {found.faults[0]}"
    if not near or "accelerator" in failed:
        return _from_release(selection.request, host, found)
    own, made = host.processor, near[0].offer.artifact
    if "simd" in failed and own is not None and made.simd.runs_on(own):
        return "Unset DSOPS_SIMD"
    commands = _commands(made, failed, host) if failed <= _PIP_CURES else []
    fitting = _fitting(selection.request, host, found)
    if fitting and not failed & (_FIXED | {"sources"}):
        return fitting
    if commands:
        return f"Run: {' && '.join(commands)}"
    if failed & _FIXED:
        return f"No other payload changes that; {_JIT}"
    return _from_release(selection.request, host, found)


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
    if not holders:
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


def text(selection: Selection, host: Host, found: Installed) -> str:
    """``dsops explain``: the machine, the choice, and every artifact of the op with every reason against it."""
    lines = [f"Asked for: {selection.request}", *_facts(host)]
    lines.append(
        f"Chosen: {selection.chosen}" if selection.chosen else f"Chosen: none; {headline(selection, host, found)}"
    )
    if selection.chosen:
        lines.append(f"  {selection.chosen.folder}/{selection.chosen.artifact.file}")
    disable = host.setting("DSOPS_DISABLE") or "0"
    if disable != "0":
        lines.append(f"DSOPS_DISABLE={disable}: training would not use it, DeepSpeed goes on as without dsops-prebuilt")
    lines.append(f"Artifacts of {selection.request.op} ({len(selection.verdicts)}), best first:")
    for verdict in selection.verdicts:
        lines += _verdict(verdict)
    lines += [f"Unusable: {fault}" for fault in found.faults]
    return "\n".join(lines)


def as_json(selection: Selection, host: Host, found: Installed) -> Dict[str, Any]:
    """The same as plain values for ``--json``."""
    return {
        "op": selection.request.op,
        "accelerator": selection.request.accelerator,
        "host": facts(host),
        "settings": settings(host),
        "chosen": None if selection.chosen is None else str(selection.chosen),
        "path": None if selection.chosen is None else f"{selection.chosen.folder}/{selection.chosen.artifact.file}",
        "reason": None if selection.chosen else headline(selection, host, found),
        "artifacts": [
            {
                "artifact": str(verdict.offer),
                "tier": verdict.offer.artifact.tier,
                "simd": verdict.offer.artifact.simd.value,
                "build": verdict.offer.build,
                "accepted": verdict.accepted,
                "rejections": [{"key": item.key, "reason": item.reason} for item in verdict.rejections],
            }
            for verdict in selection.verdicts
        ],
        "faults": list(found.faults),
    }


def facts(host: Host) -> Dict[str, Optional[str]]:
    """What selection knows of the machine, by name, each in words; None is unknown or absent."""
    torch, gpus = host.torch, host.gpus()
    return {
        "python": host.python,
        "system": host.system,
        "machine": host.machine,
        "libc": _word(host.libc),
        "simd": _word(host.simd),
        "torch": None if torch is None else torch.version,
        "torch_cuda": None if torch is None else torch.cuda,
        "cxx11_abi": None if torch is None or torch.cxx11_abi is None else str(int(torch.cxx11_abi)),
        "deepspeed": host.deepspeed,
        "sources": host.csrc,
        "gpus": None if gpus is None else ", ".join(map(str, gpus)) or "none",
        "driver_cuda": _word(host.driver),
    }


def _facts(host: Host) -> List[str]:
    known = facts(host)
    cuda = f"CUDA {known['torch_cuda']}" if known["torch_cuda"] else "without CUDA"
    torch = (
        f"{known['torch']}, {cuda}, C++11 ABI {known['cxx11_abi'] or 'unknown'}" if known["torch"] else "not installed"
    )
    gpus = known["gpus"] or "unknown (libnvidia-ml.so.1 does not answer)"
    libc = known["libc"] or "libc unknown"
    shown = {
        "system": f"{known['system']} {known['machine']}, {libc}, SIMD {known['simd'] or 'unknown'}",
        "python": known["python"],
        "torch": torch,
        "deepspeed": f"{known['deepspeed'] or 'not installed'}, sources {known['sources'] or 'not installed'}",
        "gpus": f"{gpus}, driver for CUDA {known['driver_cuda']}" if known["driver_cuda"] else gpus,
    }
    in_force = " ".join(f"{name}={value}" for name, value in settings(host).items())
    if in_force:
        shown["settings"] = in_force
    return ["This machine:", *(f"  {name:<10}{value}" for name, value in shown.items())]


def settings(host: Host) -> Dict[str, str]:
    """The ``DSOPS_*`` variables that are set, by name."""
    values = ((name, host.setting(name)) for name in _SETTINGS)
    return {name: value for name, value in values if value is not None}


def _verdict(verdict: Verdict) -> List[str]:
    made = verdict.offer.artifact
    word = "accepted" if verdict.accepted else "rejected"
    lines = [f"  {verdict.offer}  [{made.tier}, {made.simd}, build {verdict.offer.build}]  {word}"]
    return lines + [f"    {item.key}: {item.reason}" for item in verdict.rejections]


def _nearest(selection: Selection) -> List[Verdict]:
    """Fewest failing keys first; of those too high for the processor or ``DSOPS_SIMD``, the level just above it."""
    return sorted(selection.verdicts, key=_distance)


def _distance(verdict: Verdict) -> Tuple[Any, ...]:
    above = any(item.key == "simd" for item in verdict.rejections)
    return len(verdict.rejections), verdict.offer.artifact.simd.rank if above else 0, verdict.offer.preference


def _nothing(found: Installed) -> str:
    labels = ", ".join(payload.manifest.label for payload in found.payloads)
    return f"Payloads installed: {labels}; none of them holds this op" if labels else "Payloads installed: none"


def _word(value: object) -> Optional[str]:
    return None if value is None else str(value)
