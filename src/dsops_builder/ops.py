"""Read the descriptors of the ops, ``ops/<id>/op.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dsops_builder.faults import Fault, Faults, differs
from dsops_builder.model import Accelerator, BuildVariable, Filled, Frozen, ModuleName, Op, OpName, SourceName
from dsops_builder.shape import check_shape
from dsops_builder.yamlfile import read_yaml

FILE_NAME = "op.yaml"


class _Descriptor(Frozen):
    name: OpName
    kernel: Literal["host", "cuda"]
    accelerators: Filled[Accelerator]
    build_variable: BuildVariable
    module: ModuleName
    portable: tuple[SourceName, ...] = ()


def load_ops(folder: Path) -> tuple[Op, ...]:
    """Return the ops of ``folder``, sorted by id. Raises one :class:`MatrixError` with every fault of every file."""
    faults = Faults()
    ops = collect_ops(folder, faults)
    return faults.settle(tuple(op for op in ops.values() if op is not None))


def collect_ops(folder: Path, faults: Faults) -> dict[str, Op | None]:
    """Return the ops of ``folder`` by id, sorted; None for a descriptor that has faults, which go into ``faults``.

    Folders without a descriptor are faults too: what is in ``ops/`` is an op, or code that ops share (``_portable``),
    or it should not be there.
    """
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_dir() and item.name[0] != "_")
    except OSError as error:
        faults.add(Fault(file=str(folder), line=None, where=(), text=f"cannot be read: {error.strerror}"))
        return {}
    if not names:
        faults.add(Fault(file=str(folder), line=None, where=(), text=f"has no op; accepted: NAME/{FILE_NAME}"))
    return {name: _read(folder / name / FILE_NAME, name, faults) for name in names}


def _read(path: Path, name: str, faults: Faults) -> Op | None:
    file = read_yaml(path, faults)
    if file is None:
        return None
    descriptor = check_shape(_Descriptor, file, faults)
    found = file.text("name")
    accelerators = tuple(file.texts("accelerators").values())
    if found is not None and name not in {found, f"{found}_{'_'.join(accelerators)}"}:
        text = differs(file.spellings["name",], f'"{name}", the name of its folder, or that without the accelerator')
        faults.add(file.fault(("name",), text))
    if faults.under(file.name, ()) or descriptor is None:
        return None
    return Op(id=name, **dict(descriptor))
