"""The one seam to DeepSpeed: what its op builders answer to ``load`` and ``is_compatible``, and what its report shows.

Both are answered before DeepSpeed probes for compilers. They exist, under these names, in every release from 0.9.0 to
0.19.8 (op_builder/builder.py), and everything in DeepSpeed that needs an op goes through them.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Callable, Optional, Set, Tuple

from dsops_prebuilt._host import Host, detect
from dsops_prebuilt._load import has_reference, installed, serve
from dsops_prebuilt._select import Request, may_serve, on_miss, select

_MARK = "_dsops_prebuilt"
_missed: Set[Request] = set()


def attach(name: str, module: Any) -> None:
    """Change one of the modules that ``dsops_prebuilt_activate`` watches, after it has run; twice is harmless."""
    if name == "deepspeed.env_report":
        from dsops_prebuilt import _report

        _report.show(module, _request, _accelerator())
        return
    base = vars(module)["OpBuilder"]
    if _MARK in vars(base):
        return
    setattr(base, _MARK, True)
    base.load = _load_of(base)

    def __init_subclass__(cls: Any, /, **options: Any) -> None:  # noqa: N807 - it becomes the base's
        super(base, cls).__init_subclass__(**options)  # no release of DeepSpeed has one of its own here
        _wrap_is_compatible(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)
    pending = [base]
    while pending:
        builder = pending.pop()
        _wrap_is_compatible(builder)
        pending.extend(builder.__subclasses__())


def _load_of(base: Any) -> Callable[..., Any]:
    original = base.load

    @functools.wraps(original)
    def load(self: Any, *args: Any, **options: Any) -> Any:
        try:
            module = None if self.name in getattr(base, "_loaded_ops", {}) else _prebuilt(self)
            if module is None:
                return original(self, *args, **options)
        except Exception:
            from dsops_prebuilt._unfinished import spare_unfinished

            spare_unfinished(sys._getframe().f_back)  # noqa: SLF001 - the only way to the half-made caller
            raise
        if hasattr(base, "_loaded_ops"):
            base._loaded_ops[self.name] = module  # noqa: SLF001 - DeepSpeed's own memo
        return module

    return load


def _wrap_is_compatible(cls: Any) -> None:
    original = vars(cls).get("is_compatible")
    if original is None:
        return

    @functools.wraps(original)
    def is_compatible(self: Any, *args: Any, **options: Any) -> Any:
        try:
            answer = _compatible(self)
            return original(self, *args, **options) if answer is None else answer
        except Exception as error:  # noqa: BLE001
            # Before 0.19.5 DeepSpeed probes every op while it is imported, and one failing probe is a failed import
            # (DeepSpeed issue 7452); jit_load shows this attribute where the op is really wanted.
            self.error_log = str(error)
            return False

    cls.is_compatible = is_compatible


def _request(builder: Any) -> Optional[Request]:
    """What a builder asks for, or None where it is not ours to answer.

    ``op_builder.cpu.fused_adam`` and ``op_builder.fused_adam`` share a name and not a kernel, and the CPU optimizers of
    ``op_builder.cpu`` serve a CUDA run too: so the subpackage names the accelerator, then the class, then DeepSpeed.
    A builder from elsewhere may use a name of DeepSpeed's for sources of its own; NotImplementedBuilder has to fail.
    """
    package, found, rest = type(builder).__module__.rpartition("op_builder.")
    refuses = any(cls.__name__ == "NotImplementedBuilder" for cls in type(builder).__mro__)
    if refuses or not found or package not in ("", "deepspeed.ops."):
        return None
    if "." in rest:
        return Request(builder.name, rest.split(".")[0])
    return Request(builder.name, "cuda" if _is_cuda(builder) else _accelerator())


def _accelerator() -> str:
    return str(import_module("deepspeed.accelerator").get_accelerator()._name)  # noqa: SLF001 - as DeepSpeed's load asks


def _precompiled(builder: Any) -> bool:
    """Whether DeepSpeed was installed with this op and would load it here (``OpBuilder.load``, 0.19.8)."""
    info: Any = sys.modules.get("deepspeed.git_version_info")
    there = getattr(info, "installed_ops", {}).get(builder.name, False)
    if not there or getattr(info, "accelerator_name", _accelerator()) != _accelerator():
        return False
    try:
        builder.validate_torch_version(info.torch_info)
        if _is_cuda(builder) and sys.modules["torch"].cuda.is_available():
            builder.validate_torch_op_version(info.torch_info)
    except RuntimeError:
        return False
    return True


def _is_cuda(builder: Any) -> bool:
    return any(cls.__name__ == "CUDAOpBuilder" for cls in type(builder).__mro__)


def _compatible(builder: Any) -> Optional[bool]:
    """True, False, or None for DeepSpeed's own answer. Asks no GPU and hashes nothing."""
    request = _request(builder)
    if request is None or _precompiled(builder):
        return None
    host = detect()
    word = on_miss(host)
    fits = request not in _missed and may_serve(installed().offers, request, host)
    if fits or has_reference(request, host):
        return True
    if word == "jit":
        return None
    return False if word == "error" or _obstacles(builder, host) else None


def _obstacles(builder: Any, host: Host) -> Tuple[str, ...]:
    return host.jit_obstacles(_is_cuda(builder) and _accelerator() == "cuda")


def _prebuilt(builder: Any) -> Optional[ModuleType]:
    """The module of the artifact that fits, or of the reference; None where DeepSpeed goes on as without us."""
    request = _request(builder)
    if request is None:
        return None
    import_module("deepspeed.git_version_info")
    if _precompiled(builder):
        return None
    host, found = detect(), installed()
    word = on_miss(host)
    selection = select(found.offers, request, host)
    module = serve(selection, host, found)
    if module is not None:
        return module
    _missed.add(request)
    from dsops_prebuilt import _explain, _notice, _remedy

    obstacles = _obstacles(builder, host)
    if word == "error" or (word != "jit" and obstacles):
        raise _explain.miss(selection, host, found, obstacles)
    _notice.tell_once(_remedy.headline(selection, host, found) + "; DeepSpeed compiles it now")
    return None
