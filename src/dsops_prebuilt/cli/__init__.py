"""The ``dsops`` command: one module a verb; data on stdout, errors on stderr, the error's exit code to the shell."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Optional, Sequence

from dsops_prebuilt import __version__
from dsops_prebuilt._errors import DsopsError
from dsops_prebuilt._host import Host, detect
from dsops_prebuilt.cli import explain, listing

VERBS = (explain, listing)
_SETTINGS = """\
settings, from the environment:
  DSOPS_TIER=stock|portable|reference         use that tier only; reference is plain torch, for the CPU optimizers
  DSOPS_ON_MISS=auto|jit|error|reference      what happens where nothing fits; auto: DeepSpeed compiles if it can
  DSOPS_SIMD=x86_64|x86_64_v3|x86_64_v4       use a lower SIMD level than the processor has
  DSOPS_DISABLE=1                             leave DeepSpeed alone
"""
_BROKEN_PIPE = 141  # as of a program that SIGPIPE ended


def main(arguments: Optional[Sequence[str]] = None, host: Optional[Host] = None) -> int:
    """Run the command, by default that of ``sys.argv``, on ``host``, by default this machine; return its exit code.

    0 is success; every :class:`DsopsError` has a code of its own; :mod:`argparse` exits with 2 for a usage fault.
    """
    options = parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding has not
    try:
        code: int = options.run(options, host or detect())
        sys.stdout.flush()
    except DsopsError as error:
        print(f"dsops: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read has enough, as `head`; without this the interpreter's own flush at exit fails once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return code


def parser() -> argparse.ArgumentParser:
    """The command line of every verb."""
    top = argparse.ArgumentParser(
        prog="dsops",
        description="DeepSpeed's ops, prebuilt: what is here, and what fits.",
        epilog=_SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"dsops-prebuilt {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        verb.add(verbs)
    return top
