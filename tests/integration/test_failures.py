"""What stops a build: a compiler's error, an op that DeepSpeed leaves out, a user who changes his mind."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsops_builder.compile import StockCompiler
from dsops_builder.compiler import CompilerHome
from dsops_builder.errors import CompileError
from dsops_builder.fetch import Sdists
from dsops_builder.model import Matrix, Op, SourceTree, Target
from dsops_builder.process import Shell
from dsops_builder.torchenv import TorchEnv

ROOT = Path(__file__).parents[2]


@pytest.fixture
def private_cache(cache: Path, tmp_path: Path) -> Path:
    """A cache with the session's toolchain and nothing that has been compiled, whose sdist may be replaced."""
    for name in ("debian", "torch", "compiler", "env", "python-headers", "tracer"):
        (tmp_path / name).symlink_to((cache / name).resolve())
    return tmp_path


@pytest.fixture
def stock(private_cache: Path, matrix: Matrix, compiler: CompilerHome, target: Target) -> StockCompiler:
    """A compiler of targets whose DeepSpeed has an error in one file."""
    release = target.deepspeed
    tree = Sdists(matrix.deepspeed, private_cache / "good", Shell()).unpack(release, private_cache)
    source = tree / "csrc/adam/cpu_adam.cpp"
    source.write_text("#error planted here\n" + source.read_text())
    broken = private_cache / f"sdist/deepspeed-{release}.tar.gz"
    broken.parent.mkdir()
    with tarfile.open(broken, "w:gz") as archive:
        archive.add(tree, tree.name)
    trees = {release: SourceTree(sdist_sha256=hashlib.sha256(broken.read_bytes()).hexdigest())}
    sdists = Sdists(trees, private_cache, Shell())
    return StockCompiler(sdists=sdists, compiler=compiler, cache=private_cache, jobs=2, runner=Shell())


def test_an_error_in_the_sources_shows_the_compilers_own_lines(
    stock: StockCompiler, target: Target, torch_env: TorchEnv
) -> None:
    with pytest.raises(CompileError) as failure:
        stock.compile(target, torch_env, None)
    message = str(failure.value)
    assert message.startswith(f"{target.id} did not compile\n")
    assert "csrc/adam/cpu_adam.cpp" in message
    assert "error: #error planted here" in message
    assert list((stock.cache / "compiled").iterdir()) == []


def test_an_op_that_deepspeed_leaves_out_is_a_failure(
    stock: StockCompiler, target: Target, torch_env: TorchEnv
) -> None:
    # Its builder finds no libaio here, says so, and setup.py ends with 0.
    op = Op(
        id="async_io",
        name="async_io",
        kernel="host",
        accelerators=("cpu",),
        build_variable="DS_BUILD_AIO",
        module="deepspeed.ops.aio.async_io_op",
    )
    with pytest.raises(CompileError, match="DeepSpeed did not build async_io"):
        stock.compile(replace(target, op=op), torch_env, None)


def processes_of(folder: Path) -> Iterator[str]:
    """Command lines that name the folder, of processes that are still there."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in command:
            yield command


def wait_for(seconds: float, what: str, folder: Path) -> None:
    """Wait until a process that names the folder and has ``what`` in its command line is there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(what in command for command in processes_of(folder)):
            return
        time.sleep(0.2)
    raise AssertionError(f"no {what} within {seconds} s")


@pytest.mark.usefixtures("torch_env")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_stop_in_the_middle_leaves_nothing_behind(private_cache: Path, cache: Path, number: signal.Signals) -> None:
    (private_cache / "sdist").symlink_to((cache / "sdist").resolve())
    dist = private_cache / "dist"
    command = [
        sys.executable,
        "-m",
        "dsops_builder",
        "build",
        "1_cpu",
        "--dist",
        str(dist),
        "--cache",
        str(private_cache),
    ]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
        # Where tests run in the background of a shell they ignore SIGINT, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  there are no threads
    ) as build:
        wait_for(120, "cc1plus", private_cache)
        build.send_signal(number)
        _, said = build.communicate(timeout=60)
    assert build.returncode == 130
    assert "error: interrupted; nothing half-made was left" in said
    assert list(processes_of(private_cache)) == []
    assert not dist.exists() or list(dist.iterdir()) == []
    assert list((private_cache / "compiled").iterdir()) == []
