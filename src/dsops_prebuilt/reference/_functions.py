"""Make the functions of an op's module: the stock module's names and arguments, the portable tier's checks."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Callable, Dict

from dsops_prebuilt.portable._arguments import Signature
from dsops_prebuilt.portable._rules import RULES, by_parameter, check_values
from dsops_prebuilt.portable._tensors import Tensors

Function = Callable[..., Any]

_SURFACE: Dict[str, Dict[str, str]] = {
    "cpu_adam": {
        "create_adam": "ifffff??>i",
        "adam_update": "iQfffff?rrrr>i",
        "adam_rollback": "iQfffff?rrrr>i",
        "destroy_adam": "i>i",
    },
    "cpu_adagrad": {"create_adagrad": "ifff?>i", "adagrad_update": "iQfffrrr>i", "destroy_adagrad": "i>i"},
    "cpu_lion": {"create_lion": "iffff?>i", "lion_update": "iQffffrrr>i", "destroy_lion": "i>i"},
    "fused_adam": {"multi_tensor_adam": "it[[t]]ffffiiif>v"},
    "fused_lion": {"multi_tensor_lion": "it[[t]]fffiif>v"},
}
"""By op, the functions and their signatures, in the letters of ``ops/_portable/include/dsops/table.h``."""
_ZENFLOW = (
    "create",
    "register_group",
    "destroy",
    "ctrl_size",
    "ctrl_init",
    "run_worker",
    "submit",
    "wait",
    "ctrl_exit",
)


def functions_of(op: str) -> Dict[str, Function]:
    """The functions of the stock module of ``op``, by name. Imports torch."""
    home = import_module(f"dsops_prebuilt.reference._{op.rpartition('_')[2]}")
    tensors = Tensors()
    made = {name: _checked(name, text, getattr(home, name), tensors) for name, text in _SURFACE[op].items()}
    if op == "cpu_adam":
        made.update({name: _refusal(name) for name in (f"zenflow_adam_{word}" for word in _ZENFLOW)})
    return made


def _checked(name: str, text: str, run: Function, tensors: Tensors) -> Function:
    """``run`` with converted arguments, positional only, once no tensor breaks the function's rule."""
    signature, rule = Signature.parse(name, text), RULES.get(name)
    starts = text.find("r")

    def function(*args: Any) -> Any:
        values = signature.convert(args)
        check_values(name, signature.letters, values)
        if rule is not None and starts < 0:
            tensors.check_one(f"{name}: an argument", values[1])
            for group in by_parameter(name, rule, values):
                tensors.check(name, rule, group)
        elif rule is not None:
            tensors.check(name, rule, tuple(values[starts:]))
        return run(*map(_dense, values))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{signature}: DeepSpeed's function of this name, in plain torch."
    return function


def _dense(value: Any) -> Any:
    """``value``, with a contiguous copy of each tensor that is not; what is written is, by the rules."""
    if isinstance(value, list):
        return [_dense(item) for item in value]
    return value.contiguous() if hasattr(value, "contiguous") else value


def _refusal(name: str) -> Function:
    """ZenFlow steps in a process of its own, which runs the compiled op on memory that both share."""

    def function(*args: Any) -> Any:
        raise NotImplementedError(
            f"{name}: the reference tier has no ZenFlow, whose optimizer process needs the compiled op; "
            "unset DSOPS_TIER and DSOPS_ON_MISS, and run `dsops explain cpu_adam` for what it lacks here"
        )

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name}: refuses; the reference tier has no ZenFlow."
    return function
