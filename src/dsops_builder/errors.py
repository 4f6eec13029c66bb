"""Say what stopped a build: one root, one exit code for each kind."""

from __future__ import annotations


class BuilderError(Exception):
    """Root of the builder's errors. ``exit_code`` is what the command line returns; codes are unique."""

    exit_code = 1


class UsageError(BuilderError):
    """The command line asks for something that the matrix does not have."""

    exit_code = 2


class MatrixError(BuilderError):
    """``build_matrix.yaml`` or an op's descriptor has faults; the message lists all of them."""

    exit_code = 3


class CommandError(BuilderError):
    """A command ended with a code other than 0; the message has the command, the code and its last lines.

    ``code`` is the command's own exit code, None when it could not be started; ``output`` is all that it printed.
    """

    exit_code = 4

    def __init__(self, message: str, code: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.output = output


class FetchError(BuilderError):
    """A download failed, or what came is not what its pinned sha256 says."""

    exit_code = 5


class ToolchainError(BuilderError):
    """A compiler, toolkit or interpreter is not what the matrix says it must be."""

    exit_code = 6


class CompileError(BuilderError):
    """An op did not compile, or DeepSpeed left it out; the message has the compiler's own lines."""

    exit_code = 7


class GateError(BuilderError):
    """A wheel failed ``verify``; the message lists every gate that it failed."""

    exit_code = 8


class SmokeError(BuilderError):
    """The training step in a clean environment did not do what it must."""

    exit_code = 9


class Interrupted(BuilderError):  # noqa: N818  a wish of the user, not an error
    """The user pressed Ctrl-C; nothing half-made was left in ``dist/``."""

    exit_code = 130
