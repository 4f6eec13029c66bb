"""What each function of the ops asks of its tensors and numbers: who shares a size and a dtype, and who is written.

The sources say none of this: they read every tensor with the first one's number of elements and with the dtype of one
of each kind (csrc/adam/cpu_adam_impl.cpp, ``invoke`` and its siblings, DeepSpeed 0.14.4 to 0.19.8), so a tensor that
does not fit is memory that is not the tensor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple


@dataclass(frozen=True)
class Rule:
    """``tensors`` are the names of a function's tensors, in order; all of them have one size.

    ``written`` are those that must be contiguous, as a copy of them would be updated instead. ``alike`` are pairs of
    one dtype, by name; None where the source checks dtypes itself.
    """

    tensors: Tuple[str, ...]
    written: Tuple[str, ...]
    alike: Tuple[Tuple[str, str], ...] = ()


_ADAM = ("params", "grads", "exp_avg", "exp_avg_sq")
_ZENFLOW = ("param", "grad0", "grad1", "exp_avg0", "exp_avg1", "exp_avg_sq0", "exp_avg_sq1", "stale")

RULES: Dict[str, Rule] = {
    "adam_update": Rule(
        _ADAM,
        ("params", "exp_avg", "exp_avg_sq"),
        (("params", "grads"), ("exp_avg", "exp_avg_sq")),
    ),
    # It refuses every dtype but float32 itself, with -1 and a line on stdout.
    "adam_rollback": Rule(_ADAM, ("params", "exp_avg", "exp_avg_sq")),
    # The step is also stored into grads, for nobody: gradients that are not contiguous train all the same.
    "adagrad_update": Rule(
        ("params", "grads", "exp_avg_sq"),
        ("params", "exp_avg_sq"),
        (("params", "grads"),),
    ),
    "lion_update": Rule(
        ("params", "grads", "exp_avg"),
        ("params", "exp_avg"),
        (("params", "grads"),),
    ),
    "multi_tensor_adam": Rule(
        ("grads", "params", "exp_avg", "exp_avg_sq"),
        ("params", "exp_avg", "exp_avg_sq"),
        (("params", "grads"), ("exp_avg", "exp_avg_sq")),
    ),
    "multi_tensor_lion": Rule(
        ("grads", "params", "exp_avg"),
        ("params", "exp_avg"),
        (("params", "grads"),),
    ),
    # The worker reads the gradients long after the call, so these must be the tensors themselves too.
    "zenflow_adam_register_group": Rule(
        _ZENFLOW,
        _ZENFLOW,
        tuple(("param", name) for name in ("grad0", "grad1", "stale"))
        + tuple(("exp_avg0", name) for name in ("exp_avg1", "exp_avg_sq0", "exp_avg_sq1")),
    ),
}
"""By function; one that takes no tensor has no rule."""

_GROUPS = 1024
"""ZEN_MAX_GROUPS of csrc/adam/cpu_adam_impl.cpp (0.19.3 to 0.19.8), which ``zenflow_adam_submit`` does not check."""


def by_parameter(name: str, rule: Rule, values: Sequence[Any]) -> List[Tuple[Any, ...]]:
    """The tensors of each parameter, out of the one value that is a list: one list for each of the rule's.

    Raises :class:`ValueError` for another number of lists, and for lists of different lengths.
    """
    lists = next(value for value in values if isinstance(value, list))
    if len(lists) != len(rule.tensors) or len({len(tensors) for tensors in lists}) != 1:
        found = f"{len(lists)} lists of {[len(tensors) for tensors in lists]} tensors"
        raise ValueError(f"{name}: {found}; one list each of {', '.join(rule.tensors)} is needed")
    return list(zip(*lists))


def check_values(name: str, letters: Sequence[str], values: Sequence[Any]) -> None:
    """Raise :class:`ValueError` for numbers that the sources use as an address, an index or a length, and are none."""
    # ZenFlow's control block arrives as an address, the first argument or the second; a step is an unsigned number too.
    if name.startswith("zenflow_") and any(letter == "Q" and value == 0 for letter, value in zip(letters, values)):
        raise ValueError(f"{name}: the control block's address is 0")
    if name == "zenflow_adam_submit":
        lengths = {len(items) for items in values[3:]}
        if len(lengths) != 1 or max(lengths) > _GROUPS:
            raise ValueError(f"{name}: lists of {sorted(lengths)} items; one length, at most {_GROUPS}")
        _require_pair(name, "now_state", values[1], "there are two buffers")
    elif name == "multi_tensor_adam":
        _require_pair(name, "mode", values[8], "0 is Adam with L2, 1 is AdamW")


def _require_pair(name: str, word: str, value: int, meaning: str) -> None:
    if value not in (0, 1):
        raise ValueError(f"{name}: {word} is {value!r}; {meaning}")
