"""Decide, from values alone, what a row's build makes, what it leaves out and why, and where everything comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from dsops_builder.errors import UsageError
from dsops_builder.faults import listed, suggestion
from dsops_builder.model import Excluded, Matrix, Op, Pairing, Row, Target, TorchOrigin, split_row_id
from dsops_prebuilt._variant import Simd

LABEL_INDEX = "https://download.pytorch.org/whl/{label}"
"""PyTorch's own index for a CUDA label or ``cpu`` ("Get Started", previous versions)."""

_NEW_ABI_SINCE = (2, 7)
"""From torch 2.7.0 on the default index's Linux wheels have C++11 ABI 1 (release notes of 2.7.0); before it, 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What the command line asks for. None takes everything that the row has."""

    row: str
    torch: str | None = None
    python: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a plan needs to know of the machine.

    ``indexes`` says of each label whether PyTorch's index for it answered; ``interpreters`` has the path of each
    Python (``"3.11"``), None where there is none. What is not in them counts as not there.
    """

    indexes: Mapping[str, bool]
    interpreters: Mapping[str, Path | None]


def everything(matrix: Matrix) -> Facts:
    """The facts of a machine that has every Python of the matrix, by its usual name, and reaches every index."""
    pairings = [pairing for row in matrix.rows.values() for pairing in row.pairings]
    return Facts(
        indexes={split_row_id(row)[1]: True for row in matrix.rows},
        interpreters={python: Path(f"python{python}") for pairing in pairings for python in pairing.pythons},
    )


class RowJson(TypedDict):
    """One row for GitHub Actions: an entry of ``strategy.matrix.include``."""

    id: str
    label: str
    build: int
    torches: list[str]
    pythons: list[str]
    targets: int
    excluded: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one run of ``build`` makes. ``compiler`` and ``toolkit`` are sentences for people.

    ``torch_origins`` has the origin of each torch release of the targets, ``interpreters`` the path of each Python.
    """

    row: str
    build: int
    label: str
    targets: tuple[Target, ...]
    excluded: tuple[Excluded, ...]
    torch_origins: tuple[tuple[str, TorchOrigin], ...]
    interpreters: tuple[tuple[str, Path], ...]
    compiler: str
    toolkit: str | None

    def torch_origin(self, torch: str) -> TorchOrigin:
        """Where the headers of this torch release come from; ``torch`` is one of a target's."""
        return dict(self.torch_origins)[torch]

    def interpreter(self, python: str) -> Path:
        """The interpreter of this Python; ``python`` is one of a target's."""
        return dict(self.interpreters)[python]

    def render(self) -> str:
        """The plan as text, without a newline at its end: targets, what is excluded, where things come from."""
        count = len(self.targets)
        plural = "" if count == 1 else "s"
        lines = [f"{self.row}: build {self.build} of the {self.label} payload, {count} target{plural}"]
        cells = [
            (one.torch, f"abi{one.cxx11_abi:d}", one.python, one.op.id, one.deepspeed, _code(one))
            for one in self.targets
        ]
        if cells:
            lines += _table(("torch", "C++11", "python", "op", "deepspeed", "code"), cells)
        if self.excluded:
            lines += ["", "excluded", *_table((), [(cell.id, cell.reason) for cell in self.excluded])]
        sources = [("compiler", self.compiler), ("toolkit", self.toolkit or "none: no CUDA code in this row")]
        sources += [("torch", _origin(origin)) for _, origin in self.torch_origins]
        sources += [("python", f"{python} at {path}") for python, path in self.interpreters]
        return "\n".join([*lines, "", "from", *_table((), sources)])

    def to_json(self) -> RowJson:
        """The plan as an entry of ``strategy.matrix.include``."""
        return RowJson(
            id=self.row,
            label=self.label,
            build=self.build,
            torches=_unique(target.torch for target in self.targets),
            pythons=_unique(target.python for target in self.targets),
            targets=len(self.targets),
            excluded=[{"id": cell.id, "reason": cell.reason} for cell in self.excluded],
        )


def make_plan(matrix: Matrix, ops: Iterable[Op], selection: Selection, facts: Facts) -> Plan:
    """Return the plan of one row. ``ops`` are those that the matrix was checked against.

    Raises :class:`UsageError` for a row, torch or Python that the matrix does not have, with what it has.
    """
    row = _row(matrix, selection)
    build, label = split_row_id(selection.row)
    maker = _Maker(row_id=selection.row, row=row, ops={op.id: op for op in ops}, facts=facts)
    cells: list[Target | Excluded] = []
    origins: dict[str, TorchOrigin] = {}
    for pairing, python in _pairs(selection, row):
        origin = maker.torch_origin(pairing)
        made = list(maker.cells(pairing, python, origin))
        if any(isinstance(cell, Target) for cell in made) and isinstance(origin, TorchOrigin):
            origins[pairing.torch] = origin
        cells += made
    targets = tuple(cell for cell in cells if isinstance(cell, Target))
    paths = [(python, facts.interpreters.get(python)) for python in _unique(target.python for target in targets)]
    compiler = matrix.compiler
    toolkit = None if row.toolkit is None else matrix.toolkits[row.toolkit]
    return Plan(
        row=selection.row,
        build=build,
        label=label,
        targets=targets,
        excluded=tuple(cell for cell in cells if isinstance(cell, Excluded)),
        torch_origins=tuple(origins.items()),
        interpreters=tuple((python, path) for python, path in paths if path is not None),
        compiler=f"{compiler.name} {compiler.version}, glibc symbols up to {compiler.glibc}, pinned Debian packages",
        toolkit=None if toolkit is None else f"CUDA {toolkit.release} from {toolkit.provider}, pinned by sha256",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    row_id: str
    row: Row
    ops: Mapping[str, Op]
    facts: Facts

    def cells(self, pairing: Pairing, python: str, origin: TorchOrigin | str) -> Iterator[Target | Excluded]:
        """Targets and exclusions of one torch and one Python; ``origin`` is a reason where there is no torch."""
        here = f"{self.row_id}/torch{pairing.torch}/cp{python.replace('.', '')}"
        reason = self._excluded(pairing.torch, python, None)
        if reason is None and self.facts.interpreters.get(python) is None:
            reason = (
                f"no Python {python} on this machine; "
                f"`pyenv install {python}` or `uv python install {python}` provides it"
            )
        if reason is None and isinstance(origin, str):
            reason = origin
        if reason is not None:
            yield Excluded(id=here, reason=reason)
            return
        for name in self.row.ops:
            reason = self._excluded(pairing.torch, python, name)
            if reason is not None:
                yield Excluded(id=f"{here}/{name}", reason=reason)
            else:
                yield from self._targets(pairing, python, self.ops[name])

    def torch_origin(self, pairing: Pairing) -> TorchOrigin | str:
        """Where the headers of the pairing's torch come from, or why they come from nowhere."""
        _, label = split_row_id(self.row_id)
        index = LABEL_INDEX.format(label=label)
        if self.facts.indexes.get(label, False):
            note = f"PyTorch's index for {label}"
            return TorchOrigin(requirement=f"torch=={pairing.torch}+{label}", index=index, note=note)
        major, minor, _ = (int(number) for number in pairing.torch.split("."))
        abi = int((major, minor) >= _NEW_ABI_SINCE)
        if abi != pairing.cxx11_abi:
            return (
                f"{index} does not answer, and torch {pairing.torch} of the default index has C++11 ABI {abi}; "
                f"this pairing has ABI {pairing.cxx11_abi}"
            )
        note = f"same release's headers from the default index; {index} does not answer"
        return TorchOrigin(requirement=f"torch=={pairing.torch}", index=None, note=note)

    def _targets(self, pairing: Pairing, python: str, op: Op) -> Iterator[Target]:
        build, label = split_row_id(self.row_id)
        cuda = op.kernel == "cuda"
        for deepspeed in self.row.deepspeed:
            # The host half of a CUDA op only launches kernels, so one build for the baseline serves every level.
            for level in (Simd.X86_64,) if cuda else self.row.simd:
                yield Target(
                    row=self.row_id,
                    build=build,
                    label=label,
                    op=op,
                    deepspeed=deepspeed,
                    torch=pairing.torch,
                    cxx11_abi=bool(pairing.cxx11_abi),
                    python=python,
                    simd=level,
                    toolkit=self.row.toolkit,
                    archs=pairing.archs if cuda else (),
                )

    def _excluded(self, torch: str, python: str, op: str | None) -> str | None:
        """The reason of the exclude that covers this cell; one that names an op covers that op's cells only."""
        for exclude in self.row.excludes:
            if exclude.op == op and exclude.torch in {None, torch} and exclude.python in {None, python}:
                return exclude.reason
        return None


def _row(matrix: Matrix, selection: Selection) -> Row:
    """The row asked for, after every word of the selection has been found in the matrix."""
    row = matrix.rows.get(selection.row)
    if row is None:
        raise UsageError(_unknown("row", selection.row, "build_matrix.yaml", matrix.rows))
    torches = [pairing.torch for pairing in row.pairings]
    if selection.torch is not None and selection.torch not in torches:
        raise UsageError(_unknown("torch", selection.torch, selection.row, torches))
    of_torch = [pairing for pairing in row.pairings if selection.torch in {None, pairing.torch}]
    pythons = _unique(python for pairing in of_torch for python in pairing.pythons)
    if selection.python is not None and selection.python not in pythons:
        where = selection.row if selection.torch is None else f"{selection.row} with torch {selection.torch}"
        raise UsageError(_unknown("python", selection.python, where, pythons))
    return row


def _pairs(selection: Selection, row: Row) -> Iterator[tuple[Pairing, str]]:
    for pairing in row.pairings:
        for python in pairing.pythons:
            if selection.torch in {None, pairing.torch} and selection.python in {None, python}:
                yield pairing, python


def _unknown(kind: str, word: str, where: str, has: Iterable[str]) -> str:
    words = list(has)
    return f"{where} has no {kind} {word}; it has {listed(words)}{suggestion(word, words)}"


def _unique(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _code(target: Target) -> str:
    return " ".join(map(str, target.archs)) if target.op.kernel == "cuda" else str(target.simd)


def _origin(origin: TorchOrigin) -> str:
    return f"{origin.requirement} from {origin.index or 'the default index'} ({origin.note})"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns, two spaces apart and indented by two; the last column is not padded."""
    lines = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


__all__ = ["LABEL_INDEX", "Facts", "Plan", "RowJson", "Selection", "everything", "make_plan"]
