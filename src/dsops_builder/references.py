"""Check what ``build_matrix.yaml`` says in one place against what it says in another.

The checks read the file's values and not a validated matrix, so that they run, and are told, beside faults of shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from dsops_builder.archs import capabilities, capability
from dsops_builder.faults import Faults, Location, differs, listed, nearest, suggestion
from dsops_builder.model import Op
from dsops_builder.yamlfile import YamlFile
from dsops_prebuilt._errors import UsageError as WordError
from dsops_prebuilt._variant import CudaRelease, GpuArch, Simd, TorchBuild

_LABEL = re.compile(r"[1-9]\d*_(?P<label>cpu|cu(?P<major>\d+)(?P<minor>\d))")
# What a system of manylinux_2_28 has (PEP 600; auditwheel's policy file): the newest tag that a wheel may have.
_CEILINGS = {"glibc": "2.28", "glibcxx": "3.4.24", "cxxabi": "1.3.11"}
_NUMBERS = re.compile(r"\d+(\.\d+)*")
# Rows are built for x86-64 only.
_LEVELS = tuple(level for level in Simd if level.machine == "x86_64")


def check_references(file: YamlFile, ops: Mapping[str, Op | None], faults: Faults) -> None:
    """Put every fault between the parts of the file into ``faults``. ``ops`` are those of the folder, by name."""
    for release in file.keys("toolkits"):
        where: Location = ("toolkits", release, "release")
        found = file.text(*where)
        if found is not None and not found.startswith(f"{release}.") and not faults.under(file.name, where[:-1]):
            accepted = f'a release of {release}, such as "{release}.1"'
            faults.add(file.fault(where, differs(file.spellings[where], accepted)))
    _check_ceilings(file, faults)
    _check_requirements(file, faults)
    _check_portable(file, ops, faults)
    for row in file.keys("rows"):
        _Row(file=file, ops=ops, faults=faults, id=row).check()


def _check_ceilings(file: YamlFile, faults: Faults) -> None:
    compilers: list[Location] = [("compiler",), *(("cross_compilers", key) for key in file.keys("cross_compilers"))]
    for compiler in compilers:
        for key, newest in _CEILINGS.items():
            where: Location = (*compiler, key)
            found = file.text(*where) or ""
            if _NUMBERS.fullmatch(found) and _numbers(found) > _numbers(newest):
                accepted = f"{newest} or older: manylinux_2_28 allows nothing newer"
                faults.add(file.fault(where, differs(file.spellings[where], accepted)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in version.split("."))


def _check_requirements(file: YamlFile, faults: Faults) -> None:
    first: dict[str, Location] = {}
    for item, text in file.texts("requirements").items():
        name = canonicalize_name(text.partition("==")[0])
        if (other := first.setdefault(name, item)) != item:
            accepted = f"each package once; item {other[-1]} is {file.spellings[other]}"
            faults.add(file.fault(item, differs(file.spellings[item], accepted)))


def _check_portable(file: YamlFile, ops: Mapping[str, Op | None], faults: Faults) -> None:
    able = [op.id for op in ops.values() if op is not None and op.portable]
    for item, name in file.texts("portable", "ops").items():
        op = ops.get(name)
        if name not in ops or (op is not None and not op.portable):
            accepted = f"an op with portable sources: {listed(able)}"
            hint = "" if name in ops else suggestion(name, able)
            faults.add(file.fault(item, differs(file.spellings[item], accepted, hint)))
    compilers = {"x86_64", *file.keys("cross_compilers")}
    levels = [level.value for level in Simd if level.machine in compilers]
    for item, text in file.texts("portable", "simd").items():
        if text in set(Simd) - set(levels):
            accepted = f"a level that a compiler is for ({listed(levels)}); `cross_compilers` has none for this machine"
            faults.add(file.fault(item, differs(file.spellings[item], accepted)))
    _check_once(file, faults, ("portable", "ops"), ("portable", "simd"))
    releases = file.keys("deepspeed")
    for cell in file.items("portable", "smoke"):
        where: Location = (*cell, "deepspeed")
        found = file.text(*where)
        if found is not None and found not in releases:
            accepted = f"{listed(releases)} of `deepspeed`"
            faults.add(file.fault(where, differs(file.spellings[where], accepted, suggestion(found, releases))))


def _check_once(file: YamlFile, faults: Faults, *lists: Location) -> None:
    for where in lists:
        first: dict[str, Location] = {}
        for item, text in file.texts(*where).items():
            if (other := first.setdefault(text, item)) != item:
                accepted = f"each entry once; item {other[-1]} is the same"
                faults.add(file.fault(item, differs(file.spellings[item], accepted)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One row and the checks of it. ``ops`` has None for an op whose descriptor is faulty."""

    file: YamlFile
    ops: Mapping[str, Op | None]
    faults: Faults
    id: str

    def check(self) -> None:
        here: Location = ("rows", self.id)
        _check_once(self.file, self.faults, (*here, "ops"), (*here, "deepspeed"), (*here, "simd"))
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
        fitting = [op.id for op in self.ops.values() if op is not None and accelerator in op.accelerators]
        for item, name in self.file.texts("rows", self.id, "ops").items():
            op = self.ops.get(name)
            if op is not None and accelerator not in op.accelerators:
                served = " and ".join(op.accelerators)
                accepted = f"an op for the {accelerator} accelerator ({listed(fitting)}); this one is for {served}"
                self._refuse(item, accepted)

    def _check_simd(self) -> None:
        where: Location = ("rows", self.id, "simd")
        kernels = self._kernels()
        if self.faults.under(self.file.name, where):
            return
        if "host" in kernels and not self.file.items(*where):
            self._fault(where, f"is missing; a row with a host op needs SIMD levels: {listed(_LEVELS)}")
        elif self.file.items(*where) and kernels == {"cuda"}:
            self._fault(where, "found SIMD levels, accepted none in a row whose ops are all CUDA ops")
        for item, text in self.file.texts(*where).items():
            if text not in _LEVELS:
                self._refuse(item, f"{listed(_LEVELS)}, the levels that the compiler makes")

    def _check_pairing(self, here: Location, torches: dict[str, Location]) -> None:
        torch = self.file.text(*here, "torch")
        if torch is not None:
            minor = TorchBuild(torch).minor
            # An artifact binds to torch's minor release, so the files of two pairings of it would be alike.
            if (other := torches.setdefault(minor, here)) != here:
                has = f"pairings[{other[-1]}] is {self.file.spellings[*other, 'torch']}"
                self._refuse((*here, "torch"), f"each minor release of torch once, for a file binds to that; {has}")
        _check_once(self.file, self.faults, (*here, "pythons"))
        if not self.faults.under(self.file.name, (*here, "pythons")):
            self._check_wheels(here, torch)
        self._check_archs((*here, "archs"))

    def _check_wheels(self, here: Location, torch: str | None) -> None:
        where: Location = (*here, "wheels")
        pythons = tuple(self.file.texts(*here, "pythons").values())
        for python in self.file.keys(*where):
            if python not in pythons:
                text = differs(f'the key "{python}"', f"{listed(pythons)} of `pythons`", suggestion(python, pythons))
                self._fault((*where, python), text)
        keys = self.file.keys(*here)
        misspelt = "wheels" not in keys and nearest("wheels", keys) is not None
        if torch is None or misspelt or self.faults.under(self.file.name, where):
            return
        for python in pythons:
            if not self.file.items(*where, python) and not self._is_excluded(torch, python):
                pip = "pip download --no-deps --only-binary :all:"
                self._fault(
                    (*where, python),
                    f"is missing: the sha256 of the torch wheel for it; `{pip} --python-version {python} "
                    f"torch=={torch}` fetches the wheel, `sha256sum torch-*.whl` prints it",
                )

    def _is_excluded(self, torch: str, python: str) -> bool:
        """Whether an exclude leaves no op of the torch and the Python to build."""
        keys = [
            [self.file.text(*exclude, key) for key in ("torch", "python", "op")]
            for exclude in self.file.items("rows", self.id, "excludes")
        ]
        return any(key[0] in {None, torch} and key[1] in {None, python} and key[2] is None for key in keys)

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
