"""The proof: wheels in a clean environment, a training run on them, and every process that it started."""

from dsops_builder.smoke.core_session import smoke_core
from dsops_builder.smoke.environment import has_payload
from dsops_builder.smoke.session import smoke_row

__all__ = ["has_payload", "smoke_core", "smoke_row"]
