"""Attach dsops-prebuilt to DeepSpeed when, and only when, DeepSpeed is imported.

One top-level file without imports of its own: it runs at every start of the interpreter (``.pth``; ``.start``, PEP 829)
and inside ``import torch`` (entry point group ``torch.backends``), where an error would make ``import torch`` fail.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Optional

WATCHED = ("deepspeed.ops.op_builder.builder", "op_builder.builder", "deepspeed.env_report")
"""The modules that are changed once they have run; ``op_builder`` is the name in a DeepSpeed source checkout."""


def install() -> None:
    """Put the finder on ``sys.meta_path``, once, and attach to what is already imported.

    Never raises. ``DSOPS_DISABLE=1`` in the environment makes it do nothing.
    """
    try:
        if _disabled() or _in_setup_script():
            return
        if not any(getattr(finder, "dsops_prebuilt", False) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        for name in WATCHED:
            module = sys.modules.get(name)
            # A module that is still running has not yet made the class that is wrapped.
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                _attach(name, module)
    except Exception as error:  # noqa: BLE001 - an entry point that raises makes `import torch` itself fail
        _tell(error)


class _Finder:
    """Finds nothing by itself: has the other finders find a watched module, and adds one step to its loading."""

    dsops_prebuilt = True

    def find_spec(
        self, name: str, path: "Optional[Sequence[str]]" = None, target: "Optional[ModuleType]" = None
    ) -> "Optional[ModuleSpec]":
        try:
            if name not in WATCHED or _disabled() or _in_setup_script():
                return None
            for finder in list(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _extend(spec.loader, name)
                    return spec
        except Exception:  # noqa: BLE001 - the import system asks the same finder next, and its error is then reported as ever
            return None
        return None


def _extend(loader: "Any", name: str) -> None:
    """Shadow ``exec_module`` on this one loader object, so that its class and ``get_source`` stay what they are.

    A loader without ``exec_module`` or without a ``__dict__`` is left alone.
    """
    shadowed = getattr(loader, "__dict__", None)
    run = getattr(loader, "exec_module", None)
    if shadowed is None or run is None or "exec_module" in shadowed:
        return

    def exec_module(module: "ModuleType") -> None:
        # A zipimporter serves many modules with one object, so this may be another one's turn.
        if module.__name__ != name:
            run(module)
            return
        shadowed.pop("exec_module", None)
        run(module)
        _attach(name, module)

    shadowed["exec_module"] = exec_module


def _attach(name: str, module: "ModuleType") -> None:
    try:
        from dsops_prebuilt import _deepspeed

        _deepspeed.attach(name, module)
    except Exception as error:  # noqa: BLE001 - a fault of ours must not take `import deepspeed` down
        _tell(error)


def _disabled() -> bool:
    from os import environ  # `site` has imported os already, so this costs nothing

    return environ.get("DSOPS_DISABLE", "0") not in ("", "0")


def _in_setup_script() -> bool:
    """Whether a ``setup.py`` is being run: DeepSpeed's own asks its builders what this machine can compile.

    setuptools executes the script's text as ``__main__`` under its file's name (setuptools/build_meta.py,
    ``run_setup``); a module of somebody's that is called ``setup`` is imported, and no such run.
    """
    frame: Any = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            file = str(frame.f_globals.get("__file__") or frame.f_code.co_filename)
            if file.replace("\\", "/").rsplit("/", 1)[-1] == "setup.py":
                return True
        frame = frame.f_back
    return False


def _tell(error: Exception) -> None:
    try:  # noqa: SIM105 - contextlib would be one more import at every start
        sys.stderr.write(
            f"dsops-prebuilt: not attached to DeepSpeed ({type(error).__name__}: {error}); DeepSpeed goes on without "
            "prebuilt ops. Run `dsops list`, reinstall dsops-prebuilt, or set DSOPS_DISABLE=1.\n"
        )
    except (AttributeError, OSError, ValueError):
        pass  # no stream, a full device or a closed one: there is nobody to tell
