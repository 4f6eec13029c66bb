"""Keep ``__del__`` away from an object of DeepSpeed's whose ``__init__`` an error ended when it asked for an op."""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any, Callable, Optional

_MARK = "_dsops_prebuilt"


def spare_unfinished(frame: Optional[FrameType]) -> None:
    """Guard the ``__del__`` of the object whose ``__init__`` is the nearest of the frames from ``frame`` outwards.

    Before 0.19.8 ``DeepSpeedCPUAdam.__del__`` uses ``self.ds_opt_adam`` without asking whether ``__init__`` came that
    far (deepspeed/ops/adam/cpu_adam.py, and its siblings), so that "has no attribute 'ds_opt_adam'" is the last, and
    for many the only, line that they see. Nothing was created, so nothing has to be destroyed.
    """
    while frame is not None and frame.f_code.co_name != "__init__":
        frame = frame.f_back
    unfinished = None if frame is None else frame.f_locals.get("self")
    for owner in type(unfinished).__mro__:
        original = vars(owner).get("__del__")
        if original is not None and owner.__module__.startswith("deepspeed."):
            vars(unfinished)[_MARK] = True
            if not hasattr(original, _MARK):
                _guard(owner, original)
            return


def _guard(owner: Any, original: Callable[[Any], None]) -> None:
    @functools.wraps(original)
    def __del__(self: Any) -> None:  # noqa: N807 - it becomes the owner's
        if _MARK not in vars(self):
            original(self)

    setattr(__del__, _MARK, True)
    owner.__del__ = __del__
