"""Put a selection into words: the one-screen answer to a miss, the text of ``dsops explain``, and its JSON."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Dict, List, Optional, Tuple

from dsops_prebuilt._errors import NoArtifactError
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import Installed, has_reference
from dsops_prebuilt._remedy import headline, nearest
from dsops_prebuilt._select import Request, Selection, Verdict, only_tier

_SHOWN = 5
_SETTINGS = ("DSOPS_DISABLE", "DSOPS_ON_MISS", "DSOPS_SIMD", "DSOPS_TIER")


def miss(selection: Selection, host: Host, found: Installed, obstacles: Tuple[str, ...] = ()) -> NoArtifactError:
    """The error of a request that nothing serves; ``obstacles`` is what DeepSpeed's own build would lack.

    Cause and remedy are the first line, because other programs show only that one when they wrap the error.
    """
    near = nearest(selection)
    lines = [headline(selection, host, found), "", f"Asked for: {selection.request}", *_facts(host)]
    lines += [f"Artifacts of {selection.request.op} that are installed ({len(near)}):" if near else _nothing(found)]
    for verdict in near[:_SHOWN]:
        lines += _verdict(verdict)
    if len(near) > _SHOWN:
        lines.append(f"  and {len(near) - _SHOWN} more: dsops explain {selection.request.op}")
    lines += [_reference(selection.request, host), *(f"Unusable: {fault}" for fault in found.faults)]
    if obstacles:
        lines.append(f"DeepSpeed cannot compile it here either; this machine lacks {'; '.join(obstacles)}")
    lines += [
        "To see every reason:",
        f"  dsops explain {selection.request.op} --accelerator {selection.request.accelerator}",
    ]
    return NoArtifactError("\n".join(lines))


def text(selection: Selection, host: Host, found: Installed) -> str:
    """``dsops explain``: the machine, the choice, and every artifact of the op with every reason against it."""
    lines = [f"Asked for: {selection.request}", *_facts(host)]
    if selection.chosen:
        lines.append(f"Chosen: {selection.chosen}")
        lines.append(f"  {selection.chosen.folder}/{selection.chosen.artifact.file}")
    else:
        word = "reference, plain torch" if has_reference(selection.request, host) else "none"
        lines.append(f"Chosen: {word}; {_why(selection, host, found)}")
    disable = host.setting("DSOPS_DISABLE") or "0"
    if disable != "0":
        lines.append(f"DSOPS_DISABLE={disable}: training would not use it, DeepSpeed goes on as without dsops-prebuilt")
    lines.append(f"Artifacts of {selection.request.op} ({len(selection.verdicts)}), best first:")
    for verdict in selection.verdicts:
        lines += _verdict(verdict)
    lines += [_reference(selection.request, host), *(f"Unusable: {fault}" for fault in found.faults)]
    return "\n".join(lines)


def as_json(selection: Selection, host: Host, found: Installed) -> Dict[str, Any]:
    """The same as plain values for ``--json``."""
    objection = _objection(selection.request, host)
    reference = selection.chosen is None and has_reference(selection.request, host)
    return {
        "op": selection.request.op,
        "accelerator": selection.request.accelerator,
        "host": facts(host),
        "settings": settings(host),
        "chosen": "reference" if reference else None if selection.chosen is None else str(selection.chosen),
        "path": None if selection.chosen is None else f"{selection.chosen.folder}/{selection.chosen.artifact.file}",
        "reason": None if selection.chosen else _why(selection, host, found),
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
        "reference": {"available": objection is None, "reason": objection},
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


def _why(selection: Selection, host: Host, found: Installed) -> str:
    """Why no artifact is chosen."""
    asked = only_tier(host) == "reference" and has_reference(selection.request, host)
    return "DSOPS_TIER=reference is in force" if asked else headline(selection, host, found)


def _reference(request: Request, host: Host) -> str:
    """The reference tier's line: whether it could serve, and what would choose it."""
    objection = _objection(request, host)
    if objection is None:
        word = "available; DSOPS_ON_MISS=reference takes it where nothing else fits, DSOPS_TIER=reference always"
    else:
        word = f"not available: {objection}"
    return f"The reference tier, plain torch: {word}"


def _objection(request: Request, host: Host) -> Optional[str]:
    tier = only_tier(host)
    if tier not in (None, "reference"):
        return f"DSOPS_TIER={tier} is in force"
    objection: Optional[str] = import_module("dsops_prebuilt.reference").objection(request, host)
    return objection


def _nothing(found: Installed) -> str:
    labels = ", ".join(payload.manifest.label for payload in found.payloads)
    return f"Payloads installed: {labels}; none of them holds this op" if labels else "Payloads installed: none"


def _word(value: object) -> Optional[str]:
    return None if value is None else str(value)
