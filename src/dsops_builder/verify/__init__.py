"""Hold a finished wheel against every gate; all failures are reported together.

What a wheel is: Binary distribution format (PEP 427 and its successors), platform tags PEP 600, Core metadata.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from dsops_builder.errors import GateError
from dsops_builder.gates import check_build_paths, check_record
from dsops_builder.verify.loader import check_loader
from dsops_builder.verify.opened import CORE, check_metadata, check_size, open_wheel
from dsops_builder.verify.payload import Context, check_payload

# A public index takes files up to 100 MB without a request; the rest is room for a rebuild that grew.
BUDGET = 95_000_000
# What everybody installs stays small.
CORE_BUDGET = 3_000_000


def verify_wheel(path: Path, context: Context) -> tuple[str, ...]:
    """Return what was checked and what was left out: one line for the wheel, one for each shared object.

    Raises :class:`GateError` with every failure (the file, what was found, what was wanted), and
    :class:`~dsops_builder.errors.CommandError` when cuobjdump does not run.
    """
    with TemporaryDirectory() as scratch:
        opened = open_wheel(path, Path(scratch))
        core = opened.distribution == CORE
        failures = [
            *check_size(path, context.budget or (CORE_BUDGET if core else BUDGET)),
            *check_record(f"{opened.dist_info}/RECORD", opened.names, opened.read),
        ]
        for name in opened.names:
            failures += check_build_paths(name, opened.read(name), context.forbidden)
        facts = ["RECORD", "metadata", "tag", "contents", f"size {path.stat().st_size}", "build paths"]
        lines: list[str] = []
        if core:
            failures += check_loader(opened)
            facts.append("entry point")
        if opened.pure:
            failures += check_metadata(opened, None)
        else:
            found, lines = check_payload(opened, context)
            failures += found
            facts += ["archive", "manifest"]
    checked = [f"{path.name}: {', '.join(facts)}", *lines]
    if failures:
        listing = "".join(f"\n  {failure}" for failure in failures)
        raise GateError(f"{path.name}: {len(failures)} failed:{listing}")
    return tuple(checked)


__all__ = ["BUDGET", "CORE_BUDGET", "Context", "verify_wheel"]
