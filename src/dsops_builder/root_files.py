"""Put the activation files at the root of the wheel: setuptools has no key for a ``.pth`` file beside the packages.

Named by ``[tool.setuptools.cmdclass]`` in pyproject.toml: it runs wherever the wheel is built, with setuptools alone.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

_FILES = ("dsops_prebuilt_activate.pth", "dsops_prebuilt_activate.start")


class BuildPy(build_py):
    """``build_py`` that also copies the ``.pth`` file (site module) and the ``.start`` file (PEP 829) to the root."""

    def run(self) -> None:
        """See :meth:`setuptools.command.build_py.build_py.run`."""
        super().run()
        if not self.editable_mode:
            for name in _FILES:
                self.copy_file(str(Path("src") / name), str(Path(self.build_lib) / name))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001, FBT002  signature of setuptools
        """See :meth:`setuptools.command.build_py.build_py.get_outputs`."""
        return [*super().get_outputs(include_bytecode), *(str(Path(self.build_lib) / name) for name in _FILES)]
