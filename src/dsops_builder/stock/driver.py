"""Run DeepSpeed's ``setup.py build_ext`` for one op with the target's flags in place of the build machine's.

Runs inside the target's environment, whose Python may be older than the builder's, with the unpacked sdist as working
folder: ``python driver.py OPTIONS.json``. Writes what was built, as JSON, to the path ``report`` of the options.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def main(options_path: str) -> None:
    """Build the op named in the options and report on it.

    Exits with a message when DeepSpeed left it out.
    """
    with open(options_path, encoding="utf-8") as stream:
        options = json.load(stream)
    import torch

    if options["cuda"] is not None:
        # Both torch (torch/utils/cpp_extension.py, _check_cuda_version) and DeepSpeed (op_builder/builder.py,
        # assert_no_cuda_mismatch) compare nvcc with torch.version.cuda, and torch has no switch for it. The headers of
        # one torch release are the same for every label, so the row's release is what the comparison must see.
        torch.version.cuda = options["cuda"]
    sys.path.insert(0, os.getcwd())
    from op_builder import builder as builder_module

    _set_target_flags(builder_module, options)
    sys.argv = ["setup.py", "build_ext", "--build-lib", options["build_lib"], "--build-temp", options["build_temp"]]
    runpy.run_path("setup.py", run_name="__main__")
    installed = runpy.run_path("deepspeed/git_version_info_installed.py")
    op = options["op"]
    # DeepSpeed leaves out an op that it takes for incompatible and goes on, so the exit code says nothing.
    if not installed["installed_ops"].get(op) or installed["accelerator_name"] != options["accelerator"]:
        sys.exit(
            f"DeepSpeed did not build {op}: installed_ops={installed['installed_ops']}, "
            f"accelerator={installed['accelerator_name']!r}"
        )
    _write_report(op, options["report"])


def _set_target_flags(module: Any, options: dict[str, Any]) -> None:
    module.OpBuilder.cpu_arch = lambda self: options["march"]
    module.OpBuilder.simd_width = lambda self: "-D" + options["simd_macro"]

    def compute_capability_args(self: Any, cross_compile_archs: Any = None) -> Any:
        # DeepSpeed parses arch tokens with int() and so cannot read 9.0a. With -gencode among the flags torch adds none
        # of its own (torch/utils/cpp_extension.py, _get_cuda_arch_flags).
        self.enable_bf16 = options["bf16"]
        return options["gencode"]

    module.CUDAOpBuilder.compute_capability_args = compute_capability_args
    original = module.OpBuilder.strip_empty_entries

    def strip_empty_entries(self: Any, args: Any) -> Any:
        # -lineinfo changes no instruction and writes the build machine's paths into every cubin.
        return [arg for arg in original(self, args) if arg != "-lineinfo"]

    module.OpBuilder.strip_empty_entries = strip_empty_entries


def _write_report(op: str, path: str) -> None:
    from op_builder.all_ops import ALL_OPS

    builder = ALL_OPS[op]
    flags = builder.cxx_args() + builder.nvcc_args()
    report = {"module": builder.absolute_name(), "sources": builder.sources(), "flags": flags}
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(report, stream)


if __name__ == "__main__":
    main(sys.argv[1])
