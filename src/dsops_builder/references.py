"""Check what ``build_matrix.yaml`` says in one place against what it says in another.

The checks read the file's values and not a validated matrix, so that they run, and are told, beside faults of shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsops_builder.archs import capabilities, capability
from dsops_builder.faults import Faults, Location, differs, listed, suggestion
from dsops_builder.model import Op
from dsops_builder.yamlfile import YamlFile
from dsops_prebuilt._errors import UsageError as WordError
from dsops_prebuilt._variant import CudaRelease, GpuArch, Simd

_LABEL = re.compile(r"[1-9]\d*_(?P<label>cpu|cu(?P<major>\d+)(?P<minor>\d))")


def check_references(file: YamlFile, ops: Mapping[str, Op | None], faults: Faults) -> None:
    """Put every fault between the parts of the file into ``faults``. ``ops`` are those of the folder, by name."""
    for release in file.keys("toolkits"):
        where: Location = ("toolkits", release, "release")
        found = file.text(*where)
        if found is not None and not found.startswith(f"{release}.") and not faults.under(file.name, where[:-1]):
            accepted = f'a release of {release}, such as "{release}.1"'
            faults.add(file.fault(where, differs(file.spellings[where], accepted)))
    for row in file.keys("rows"):
        _Row(file=file, ops=ops, faults=faults, id=row).check()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One row and the checks of it. ``ops`` has None for an op whose descriptor is faulty."""

    file: YamlFile
    ops: Mapping[str, Op | None]
    faults: Faults
    id: str

    def check(self) -> None:
        here: Location = ("rows", self.id)
        self._once((*here, "ops"), (*here, "deepspeed"), (*here, "simd"))
        self._known((*here, "ops"), self.ops, "")
        self._known((*here, "deepspeed"), self.file.keys("deepspeed"), " of `deepspeed`")
        self._check_toolkit()
        self._check_ops()
        self._check_simd()
        torches: dict[str, Location] = {}
        for pairing in self.file.items(*here, "pairings"):
            self._check_pairing(pairing, torches)
        for exclude in self.file.items(*here, "excludes"):
            self._check_exclude(exclude)

    def _fault(self, where: Location, text: str) -> None:
        self.faults.add(self.file.fault(where, text))

    def _refuse(self, where: Location, accepted: str, hint: str = "") -> None:
        self._fault(where, differs(self.file.spellings[where], accepted, hint))

    def _once(self, *lists: Location) -> None:
        for where in lists:
            first: dict[str, Location] = {}
            for item, text in self.file.texts(*where).items():
                if first.setdefault(text, item) != item:
                    self._refuse(item, f"each entry once; item {first[text][-1]} is the same")

    def _known(self, where: Location, words: Iterable[str], kind: str) -> None:
        words = tuple(words)
        for item, text in self.file.texts(*where).items():
            if text not in words:
                self._refuse(item, listed(words) + kind, suggestion(text, words))

    def _kernels(self) -> set[str]:
        """Where the row's ops run: of ``{"host", "cuda"}``, and ``unknown`` for an op that has its own fault."""
        named = self.file.texts("rows", self.id, "ops").values()
        return {op.kernel if (op := self.ops.get(name)) is not None else "unknown" for name in named}

    def _label(self) -> re.Match[str] | None:
        return _LABEL.fullmatch(self.id)

    def _check_toolkit(self) -> None:
        where: Location = ("rows", self.id, "toolkit")
        found, label = self.file.text(*where), self._label()
        own = None if label is None or label["major"] is None else f"{label['major']}.{label['minor']}"
        if found is None:
            if "cuda" in self._kernels() and own is not None and not self.faults.under(self.file.name, where):
                self._fault(where, f'is missing; a row with a CUDA op needs it: toolkit: "{own}"')
        elif own is None and label is not None:
            self._refuse(where, "no toolkit in a cpu row")
        elif found not in (known := self.file.keys("toolkits")):
            self._refuse(where, f"{listed(known)} of `toolkits`", suggestion(found, known))
        elif own is not None and found != own:
            self._refuse(where, f'"{own}", the CUDA release of the label {self.id.partition("_")[2]}')

    def _check_ops(self) -> None:
        label = self._label()
        if label is None:
            return
        accelerator = "cuda" if label["major"] else "cpu"
        fitting = [op.name for op in self.ops.values() if op is not None and accelerator in op.accelerators]
        for item, name in self.file.texts("rows", self.id, "ops").items():
            op = self.ops.get(name)
            if op is not None and accelerator not in op.accelerators:
                served = " and ".join(op.accelerators)
                accepted = f"an op for the {accelerator} accelerator ({listed(fitting)}); this one is for {served}"
                self._refuse(item, accepted)

    def _check_simd(self) -> None:
        where: Location = ("rows", self.id, "simd")
        levels = [Simd(text) for text in self.file.texts(*where).values() if text in tuple(Simd)]
        kernels = self._kernels()
        if self.faults.under(self.file.name, where):
            return
        if "host" in kernels and not self.file.items(*where):
            self._fault(where, f"is missing; a row with a host op needs SIMD levels: {listed(Simd)}")
        elif levels and kernels == {"cuda"}:
            self._fault(where, "found SIMD levels, accepted none in a row whose ops are all CUDA ops")
        elif len({level.machine for level in levels}) > 1:
            self._fault(where, f"found levels of two machines ({listed(levels)}), accepted those of one")

    def _check_pairing(self, here: Location, torches: dict[str, Location]) -> None:
        torch = self.file.text(*here, "torch")
        # A label has one build of a torch release, so a second pairing of it can only differ by mistake.
        if torch is not None and torches.setdefault(torch, here) != here:
            self._refuse((*here, "torch"), f"each torch release once; pairings[{torches[torch][-1]}] has it")
        self._once((*here, "pythons"))
        pythons = tuple(self.file.texts(*here, "pythons").values())
        for python in self.file.keys(*here, "wheels"):
            if python not in pythons:
                text = differs(f'the key "{python}"', f"{listed(pythons)} of `pythons`", suggestion(python, pythons))
                self._fault((*here, "wheels", python), text)
        self._check_archs((*here, "archs"))

    def _check_archs(self, where: Location) -> None:
        kernels = self._kernels()
        if not self.file.items(*where):
            if "cuda" in kernels and not self.faults.under(self.file.name, where):
                self._fault(where, 'is missing; a row with a CUDA op needs it, such as ["8.0", "9.0+PTX"]')
            return
        label = self._label()
        if label is not None and label["major"] is None:
            self._fault(where, "found GPU architectures, accepted none in a cpu row")
            return
        if kernels == {"host"}:
            self._fault(where, "found GPU architectures, accepted none in a row without a CUDA op")
            return
        first: dict[str, Location] = {}
        for item, text in self.file.texts(*where).items():
            try:
                name = capability(GpuArch.parse(text))
            except WordError:
                continue  # a fault of shape, told already
            if first.setdefault(name, item) != item:
                self._refuse(item, f"each compute capability once; item {first[name][-1]} is the same")
            self._check_capability(item, name)

    def _check_capability(self, where: Location, name: str) -> None:
        toolkit = self.file.text("rows", self.id, "toolkit")
        try:
            release = CudaRelease.parse(toolkit or "") if toolkit in self.file.keys("toolkits") else None
        except WordError:
            release = None  # a fault of shape, told already
        if name not in (every := capabilities()):
            self._refuse(where, f"a capability that nvcc knows: {listed(every)}", suggestion(name, every))
            return
        if release is not None and name not in (known := capabilities(release)):
            self._refuse(where, f"what nvcc {release} compiles: {listed(known)}", suggestion(name, known))

    def _check_exclude(self, where: Location) -> None:
        wanted = {key: self.file.text(*where, key) for key in ("torch", "python", "op")}
        cells = [
            {"torch": self.file.text(*pairing, "torch"), "python": python, "op": op}
            for pairing in self.file.items("rows", self.id, "pairings")
            for python in self.file.texts(*pairing, "pythons").values()
            for op in self.file.texts("rows", self.id, "ops").values()
        ]
        if any(all(word in {None, cell[key]} for key, word in wanted.items()) for cell in cells):
            return
        for key, word in wanted.items():
            has = list(dict.fromkeys(text for cell in cells if (text := cell[key]) is not None))
            if word is not None and word not in has:
                self._refuse((*where, key), f"one that the row has: {listed(has)}", suggestion(word, has))
                return
        self._fault(where, f"matches nothing: the row has no {' with '.join(filter(None, wanted.values()))}")
