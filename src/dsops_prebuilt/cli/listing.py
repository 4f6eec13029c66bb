"""``dsops list``: the installed payloads and their artifacts."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, List

from dsops_prebuilt import __version__
from dsops_prebuilt._catalogue import CPU_OPTIMIZERS, PAYLOADS
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import Installed, Payload, installed
from dsops_prebuilt._remedy import bound_to, has_platform_wheel


def add(verbs: Any) -> None:
    """Add this verb to the ``argparse`` subparsers."""
    verb = verbs.add_parser("list", help="list the installed payloads and their artifacts")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace, host: Host) -> int:
    """Print what is installed, usable or not; 0 also when nothing is."""
    found = installed()
    print(json.dumps(_as_json(found), indent=1) if options.json else _as_text(found, host))
    return 0


def _as_json(found: Installed) -> Dict[str, Any]:
    return {
        "payloads": [
            {
                "distribution": payload.manifest.distribution,
                "version": payload.manifest.version,
                "build": payload.manifest.build,
                "label": payload.manifest.label,
                "folder": str(payload.folder),
                "artifacts": [
                    {
                        "file": made.file,
                        "op": made.op,
                        "accelerators": list(made.accelerators),
                        "tier": made.tier,
                        "simd": made.simd.value,
                        "python": made.python,
                        "torch": None if made.torch is None else made.torch.exact or made.torch.minor,
                        "cuda": None if made.cuda is None else str(made.cuda.toolkit),
                        "deepspeed": [release for source in made.sources for release in source.deepspeed],
                    }
                    for made in payload.manifest.artifacts
                ],
            }
            for payload in found.payloads
        ],
        "faults": list(found.faults),
    }


def _as_text(found: Installed, host: Host) -> str:
    lines: List[str] = []
    for payload in found.payloads:
        lines += _payload(payload)
    lines += [f"Unusable: {fault}" for fault in found.faults]
    if lines:
        return "\n".join(lines)
    commands = [
        f'  pip install "dsops-prebuilt[{item.label}]=={__version__}"  for {bound_to(item)}' for item in PAYLOADS
    ]
    if has_platform_wheel(host):
        ops = ", ".join(CPU_OPTIMIZERS)
        again = f"pip install --force-reinstall --no-deps dsops-prebuilt=={__version__}"
        commands.insert(0, f"  {again}  for {ops} on the CPU, with any torch and any CPython")
    return "\n".join(["No payload is installed. Run one of:", *commands])


def _payload(payload: Payload) -> List[str]:
    manifest = payload.manifest
    lines = [
        f"{manifest.distribution} {manifest.version}, build {manifest.build}, label {manifest.label}: {payload.folder}"
    ]
    for made in manifest.artifacts:
        torch = "any torch" if made.torch is None else f"torch {made.torch.exact or made.torch.minor}"
        cuda = "" if made.cuda is None else f", CUDA {made.cuda.toolkit}"
        where = f"{made.python or 'any Python'}, {torch}{cuda}, {made.simd}"
        lines.append(f"  {made.op} ({', '.join(made.accelerators)})  {made.tier}  {where}  {made.file}")
    return lines
