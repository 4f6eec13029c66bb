"""Set up a compiler: gcc with an old glibc from pinned packages, and the link stubs that cap symbol versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsops_builder import stubs
from dsops_builder.cache import cache_key, fresh_folder
from dsops_builder.errors import ToolchainError
from dsops_builder.fetch import DebianMirror
from dsops_builder.model import HostCompiler
from dsops_builder.process import Runner
from dsops_builder.stubs import capped, defined_symbols, write_stub

# Libraries whose symbols are capped, and the name under which -l finds each.
_STUBBED = {
    "libc.so.6": None,  # libc.so is a linker script, see _write_scripts
    "libm.so.6": "libm.so",
    "libpthread.so.0": "libpthread.so",
    "libdl.so.2": "libdl.so",
    "librt.so.1": "librt.so",
    "libstdc++.so.6": "libstdc++.so",
    "libgcc_s.so.1": None,
}


_LIBGCC = "7.0.0"
"""The newest version of libgcc_s's symbols that manylinux_2_28 allows (auditwheel's policy file)."""
_BINUTILS = ("as", "ld", "strip", "ar")
_RUNS_ON = "x86_64"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where Debian's packages put what is of one machine, below the folder that they are unpacked into.

    ``root`` is to a cross compiler's programs what ``/`` is to those of this machine: where they find their loader and
    their libraries. ``libraries`` are the folders of these, ``development`` is the one of glibc's static part.
    """

    triple: str
    root: str | None
    libraries: tuple[str, ...]
    development: str
    loader: str
    output_format: str


_LAYOUTS = {
    "x86_64": _Layout(
        triple="x86_64-linux-gnu",
        root=None,
        libraries=("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"),
        development="usr/lib/x86_64-linux-gnu",
        loader="ld-linux-x86-64.so.2",
        output_format="elf64-x86-64",
    ),
    "aarch64": _Layout(
        triple="aarch64-linux-gnu",
        root="usr/aarch64-linux-gnu",
        libraries=("usr/aarch64-linux-gnu/lib",),
        development="usr/aarch64-linux-gnu/lib",
        loader="ld-linux-aarch64.so.1",
        output_format="elf64-littleaarch64",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerHome:
    """A compiler for ``machine``, ready to run.

    ``key`` names what decides its output; ``link_flags`` put the stubs first. ``sysroot`` is where an emulator finds
    the loader and the libraries for what was compiled, None where this machine has them.
    """

    key: str
    machine: str
    sysroot: Path | None
    gcc: Path
    gxx: Path
    strip: Path
    link_flags: tuple[str, ...]
    description: str


def set_up_compiler(spec: HostCompiler, mirror: DebianMirror, cache: Path, runner: Runner) -> CompilerHome:
    """Return a compiler of the matrix, unpacked into ``cache`` unless it is there.

    Raises :class:`~dsops_builder.errors.FetchError` for a package and :class:`ToolchainError` when the compiler does
    not run or is not of the version that the matrix states.
    """
    key = cache_key([spec.model_dump_json()], recipe=(__file__, stubs.__file__))
    # The wrappers and the linker scripts have the compiler's place in them: the real one, not a link that may go.
    home = (cache / "compiler").resolve() / key
    layout = _LAYOUTS[spec.machine]
    # The stubs are made last, by the compiler in its final place: without them an earlier run was stopped, or refused.
    if not (home / "stubs").exists():
        if not home.exists():
            with fresh_folder(home) as scratch:
                _unpack(spec, mirror, scratch)
                _write_wrappers(layout, scratch, home)
        _check(spec, home, runner)
        with fresh_folder(home / "stubs") as scratch:
            _write_link_stubs(spec, home, scratch, runner)
    return CompilerHome(
        key=key,
        machine=spec.machine,
        sysroot=None if layout.root is None else home / "sysroot" / layout.root,
        gcc=home / "bin/gcc",
        gxx=home / "bin/g++",
        strip=home / "bin/strip",
        link_flags=(f"-L{home / 'stubs'}", "-Wl,--as-needed"),
        description=f"{spec.name} {spec.version} for {spec.machine} with glibc capped at {spec.glibc}",
    )


def _unpack(spec: HostCompiler, mirror: DebianMirror, home: Path) -> None:
    mirror.unpack(spec.sysroot, home / "sysroot")
    mirror.unpack(spec.libraries, home / "unpacked")
    (home / "libraries").mkdir()
    # A cross binutils has its own libraries in its own package, which is not one of the sysroot's machine.
    trees = ["unpacked"] if spec.machine == _RUNS_ON else ["unpacked", "sysroot"]
    for library in sorted(path for tree in trees for path in (home / tree).glob(f"**/{_RUNS_ON}-linux-gnu/*.so*")):
        library.rename(home / "libraries" / library.name)
    # Debian's development links are absolute (libdl.so -> /lib/...): from outside the tree they lead to the host.
    for link in (home / "sysroot").rglob("*"):
        if link.is_symlink() and link.readlink().is_absolute():
            up = [".."] * (len(link.relative_to(home / "sysroot").parts) - 1)
            inside = Path(*up) / link.readlink().relative_to("/")
            link.unlink()
            link.symlink_to(inside)


def _write_wrappers(layout: _Layout, scratch: Path, home: Path) -> None:
    """Write ``bin/``: each program with the libraries that it runs on, and the compilers with their sysroot.

    The libraries are not in the sysroot's folder, whose glibc must not be loaded into a running program.
    ``DSOPS_COMPILER_FLAGS`` reaches the compilers behind every build system, nvcc's host passes too, and has the last
    word.
    """
    (scratch / "bin").mkdir()
    sysroot = home / "sysroot"
    sysroot_flags = f"--sysroot={sysroot} -B{home}/bin/"
    programs = {
        "gcc": (f"{layout.triple}-gcc-10", sysroot_flags, "$DSOPS_COMPILER_FLAGS"),
        "g++": (f"{layout.triple}-g++-10", sysroot_flags, "$DSOPS_COMPILER_FLAGS"),
        **{tool: (f"{layout.triple}-{tool}", "", "") for tool in _BINUTILS},
    }
    for name, (program, first, last) in programs.items():
        wrapper = scratch / "bin" / name
        wrapper.write_text(
            "#!/bin/sh\n"
            f"LD_LIBRARY_PATH={home}/libraries\nexport LD_LIBRARY_PATH\n"
            f'exec {sysroot}/usr/bin/{program} {first} "$@" {last}\n',
            encoding="utf-8",
        )
        wrapper.chmod(0o755)


def _check(spec: HostCompiler, home: Path, runner: Runner) -> None:
    found = runner.run([str(home / "bin/g++"), "-dumpfullversion"]).strip()
    if found != spec.version:
        raise ToolchainError(f"{home / 'bin/g++'} is version {found}, and build_matrix.yaml says {spec.version}")


def _write_link_stubs(spec: HostCompiler, home: Path, folder: Path, runner: Runner) -> None:
    newest = {"GLIBC": spec.glibc, "GLIBCXX": spec.glibcxx, "CXXABI": spec.cxxabi, "GCC": _LIBGCC}
    ceilings = {family: tuple(int(part) for part in text.split(".")) for family, text in newest.items()}
    layout = _LAYOUTS[spec.machine]
    for soname, link_name in _STUBBED.items():
        places = [home / "sysroot" / place / soname for place in layout.libraries]
        library = next(place for place in places if place.exists())
        symbols = capped(defined_symbols(library), ceilings)
        write_stub(folder / soname, symbols, home / "bin/gcc", runner, machine=spec.machine)
        if link_name is not None:
            (folder / link_name).symlink_to(soname)
    _write_scripts(layout, home, folder)


def _write_scripts(layout: _Layout, home: Path, folder: Path) -> None:
    """Write libc.so and libgcc_s.so, linker scripts like the ones they replace.

    libpthread is beside libc because glibc has it apart until 2.34, and DeepSpeed links none.
    """
    final = home / "stubs"
    nonshared = home / "sysroot" / layout.development / "libc_nonshared.a"
    loader = home / "sysroot" / layout.libraries[0] / layout.loader
    (folder / "libc.so").write_text(
        f"OUTPUT_FORMAT({layout.output_format})\nGROUP ( {final}/libc.so.6 {nonshared} "
        f"AS_NEEDED ( {final}/libpthread.so.0 {loader} ) )\n",
        encoding="utf-8",
    )
    (folder / "libgcc_s.so").write_text(f"GROUP ( {final}/libgcc_s.so.1 -lgcc )\n", encoding="utf-8")
