"""Have ``ds_report`` call an op installed where an artifact, or the reference, would be loaded for it."""

from __future__ import annotations

from typing import Any, Callable, Optional

from dsops_prebuilt._errors import UsageError
from dsops_prebuilt._host import detect
from dsops_prebuilt._load import has_reference, installed
from dsops_prebuilt._notice import tell_once
from dsops_prebuilt._select import Request, select


def show(report: Any, request_of: Callable[[Any], Optional[Request]], accelerator: str) -> None:
    """Change the report's own names; ``request_of`` is what a builder asks for.

    It reads names that it bound when it was imported (deepspeed/env_report.py); DeepSpeed does not import it.
    """
    try:
        served = [name for name, builder in report.ALL_OPS.items() if _is_served(request_of(builder))]
    except UsageError as error:  # the report is shown all the same
        tell_once(str(error))
        return
    if not served:
        return
    same = getattr(report, "accelerator_name", accelerator) == accelerator
    report.installed_ops = {name: same and on for name, on in report.installed_ops.items()}
    report.installed_ops.update(dict.fromkeys(served, True))
    if hasattr(report, "accelerator_name"):
        report.accelerator_name = accelerator


def _is_served(request: Optional[Request]) -> bool:
    host = detect()
    fits = request is not None and select(installed().offers, request, host).chosen is not None
    return fits or (request is not None and has_reference(request, host))
