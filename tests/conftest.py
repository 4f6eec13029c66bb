"""Values that tests of several folders start from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.model import Compiled, Op, Target
from dsops_builder.portable import PortableArtifact
from dsops_builder.wheel import write_wheel
from dsops_prebuilt._manifest import SourceDigest
from dsops_prebuilt._variant import GpuArch, Simd

_SAMPLES = Path(__file__).parent / "data" / "elf"
SAMPLE_NAME = "sample_op.cpython-311-x86_64-linux-gnu.so"
SAMPLE_OP = Op(
    id="sample",
    name="sample",
    kernel="host",
    accelerators=("cpu", "cuda"),
    build_variable="DS_BUILD_SAMPLE",
    module="deepspeed.ops.sample.sample_op",
)
SAMPLE_TARGET = Target(
    row="1_cu118",
    build=1,
    label="cu118",
    op=SAMPLE_OP,
    deepspeed="0.19.8",
    torch="2.7.1",
    cxx11_abi=True,
    python="3.11",
    simd=Simd.X86_64,
    toolkit="11.8",
    archs=(GpuArch(8, 0), GpuArch(9, 0, "", ptx=True)),
)

_CORE = "dsops_prebuilt-0.1.0"
_LOADER = {
    "dsops_prebuilt_activate.pth": b"import dsops_prebuilt_activate\n",
    "dsops_prebuilt_activate.py": b"",
    "dsops_prebuilt_activate.start": b"",
    "dsops_prebuilt/__init__.py": b"",
    "dsops_prebuilt/py.typed": b"",
    f"{_CORE}.dist-info/METADATA": b"Metadata-Version: 2.4\nName: dsops-prebuilt\nVersion: 0.1.0\n"
    b"License-File: LICENSE\nRequires-Python: >=3.9\n\nLicense-File: is a word here.\n",
    f"{_CORE}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{_CORE}.dist-info/entry_points.txt": b"[torch.backends]\ndsops_prebuilt = dsops_prebuilt_activate:install\n",
    f"{_CORE}.dist-info/top_level.txt": b"dsops_prebuilt\n",
    f"{_CORE}.dist-info/licenses/LICENSE": b"text",
}

CompiledSample = Callable[..., Compiled]
PortableSample = Callable[..., PortableArtifact]


@pytest.fixture
def elf_samples() -> Path:
    """The folder of the small ELF files that make.sh made."""
    return _SAMPLES


@pytest.fixture
def compiled_sample(tmp_path: Path) -> CompiledSample:
    """Makes a Compiled of an ELF sample's name, a path or bytes; keywords change its target (``kernel``: its op)."""

    def make(content: str | Path | bytes = "host.so", *, kernel: str = "host", **changes: Any) -> Compiled:
        folder = tmp_path / "compiled" / str(len(list(tmp_path.glob("compiled/*"))))
        folder.mkdir(parents=True)
        path = folder / SAMPLE_NAME
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.copyfile(_SAMPLES / content, path)
        op = SAMPLE_OP if kernel == "host" else replace(SAMPLE_OP, kernel="cuda", accelerators=("cuda",))
        return Compiled(
            target=replace(SAMPLE_TARGET, op=op, **changes),
            path=path,
            closure=("sample/sample.cpp", "includes/sample.h"),
            closure_sha256="0" * 64,
            defines=(),
            torch_built_with="2.7.1+cu126",
            provenance=(("compiler", "gcc-10 10.2.1"),),
        )

    return make


@pytest.fixture
def portable_sample(tmp_path: Path) -> PortableSample:
    """Makes a PortableArtifact of an ELF sample's name; ``releases`` are those of its one digest."""

    def make(content: str = "portable.so", *releases: str, **changes: Any) -> PortableArtifact:
        folder = tmp_path / "portable" / str(len(list(tmp_path.glob("portable/*"))))
        folder.mkdir(parents=True)
        path = Path(shutil.copyfile(_SAMPLES / content, folder / "sample_op.so"))
        closure = ("sample/sample.cpp", "includes/sample.h")
        digest = SourceDigest(sha256="0" * 64, closure=closure, deepspeed=releases or ("0.19.8",))
        facts = {"op": SAMPLE_OP, "simd": Simd.X86_64, "kernel": "scalar", "path": path, "sources": (digest,)}
        return PortableArtifact(**{**facts, **changes})

    return make


@pytest.fixture
def loader_members() -> dict[str, bytes]:
    """What is in the wheel of a small loader, beside its RECORD."""
    return dict(_LOADER)


@pytest.fixture
def loader_wheel(tmp_path: Path) -> Path:
    """The wheel of a small loader."""
    return write_wheel(tmp_path / "loader" / f"{_CORE}-py3-none-any.whl", _LOADER)


@dataclass
class FakeRunner:
    """Answers a command with what ``answer`` returns or raises, and remembers it with its environment."""

    answer: Callable[[Sequence[str]], str]
    commands: list[tuple[Sequence[str], Mapping[str, str] | None]] = field(default_factory=list)

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> str:
        del cwd, log
        self.commands.append((command, env))
        return self.answer(command)


@pytest.fixture
def fake_runner() -> Callable[[Callable[[Sequence[str]], str]], FakeRunner]:
    """Makes a runner out of a function from a command to its output."""
    return FakeRunner
