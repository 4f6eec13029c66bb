"""Put a selection into words: the one-screen answer to a miss, the text of ``dsops explain``, and its JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from dsops_prebuilt import __version__
from dsops_prebuilt._errors import NoArtifactError
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import Installed
from dsops_prebuilt._select import Selection, Verdict

_SHOWN = 5
_CURABLE = {"python", "torch", "cxx11_abi", "cuda", "sources"}
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
    label, near = _label(host), _nearest(selection)
    present = any(payload.manifest.label == label for payload in found.payloads)
    failed = {item.key for item in near[0].rejections} if near else set()
    if host.system != "Linux" or (host.libc is not None and host.libc.kind != "glibc"):
        return f"There are binaries for Linux with glibc only, not for {host.libc or host.system}; {_JIT}"
    if found.faults and not near:
        return f"Repair what is installed: {found.faults[0]}"
    if failed == {"sources"} and host.csrc is None:
        return "Run: pip install deepspeed"
    if not present and failed != {"sources"}:
        return f'Run: pip install "dsops-prebuilt[{label}]=={__version__}"'
    if not near:
        return f"The payload {label} does not hold this op; {_JIT}"
    if not failed <= _CURABLE:
        return f"No other payload changes that; {_JIT}"
    made = near[0].offer.artifact
    known = [release for source in made.sources for release in source.deepspeed]
    commands = [f'pip install --upgrade "dsops-prebuilt[{label}]"']
    if failed == {"torch"} and made.torch is not None and made.torch.exact is None:
        commands.append(f'pip install "torch=={made.torch.minor}.*"')
    if failed == {"sources"} and known:
        commands.append(f'pip install "deepspeed=={known[-1]}"')
    return f"Run: {' or: '.join(commands)}"


def text(selection: Selection, host: Host, found: Installed) -> str:
    """``dsops explain``: the machine, the choice, and every artifact of the op with every reason against it."""
    lines = [f"Asked for: {selection.request}", *_facts(host)]
    lines.append(
        f"Chosen: {selection.chosen}" if selection.chosen else f"Chosen: none; {headline(selection, host, found)}"
    )
    if selection.chosen:
        lines.append(f"  {selection.chosen.folder}/{selection.chosen.artifact.file}")
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
        "chosen": None if selection.chosen is None else str(selection.chosen),
        "path": None if selection.chosen is None else f"{selection.chosen.folder}/{selection.chosen.artifact.file}",
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
        "torch": torch if known["torch"] else "not installed",
        "deepspeed": f"{known['deepspeed'] or 'not installed'}, sources {known['sources'] or 'not installed'}",
        "gpus": f"{gpus}, driver for CUDA {known['driver_cuda']}" if known["driver_cuda"] else gpus,
    }
    return ["This machine:", *(f"  {name:<10}{value}" for name, value in shown.items())]


def _verdict(verdict: Verdict) -> List[str]:
    made = verdict.offer.artifact
    word = "accepted" if verdict.accepted else "rejected"
    lines = [f"  {verdict.offer}  [{made.tier}, {made.simd}, build {verdict.offer.build}]  {word}"]
    return lines + [f"    {item.key}: {item.reason}" for item in verdict.rejections]


def _nearest(selection: Selection) -> List[Verdict]:
    return sorted(selection.verdicts, key=lambda verdict: (len(verdict.rejections), verdict.offer.preference))


def _nothing(found: Installed) -> str:
    labels = ", ".join(payload.manifest.label for payload in found.payloads)
    return f"Payloads installed: {labels}; none of them holds this op" if labels else "Payloads installed: none"


def _label(host: Host) -> str:
    cuda = None if host.torch is None else host.torch.cuda
    return f"cu{''.join(cuda.split('.')[:2])}" if cuda else "cpu"


def _word(value: object) -> Optional[str]:
    return None if value is None else str(value)
