"""Which symbols a stub library gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsops_builder.stubs import StubSymbol, Wants, capped, write_stub
from dsops_builder.torchenv import missing_symbols

CEILINGS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}


def wants(needed: str = "", plain: str = "", defined: str = "", **versioned: tuple[str, str]) -> Wants:
    symbols = tuple((library, StubSymbol(name=name, version=version)) for name, (library, version) in versioned.items())
    return Wants(
        needed=tuple(needed.split()),
        versioned=symbols,
        plain=frozenset(plain.split()),
        defined=frozenset(defined.split()),
    )


def test_the_newest_version_below_the_ceiling_becomes_the_default() -> None:
    symbols = [
        StubSymbol(name="pow", version="GLIBC_2.29", default=True),
        StubSymbol(name="pow", version="GLIBC_2.2.5", default=False),
        StubSymbol(name="memcpy", version="GLIBC_2.14", default=True),
        StubSymbol(name="memcpy", version="GLIBC_2.2.5", default=False),
    ]
    found = {(one.name, one.version): one.default for one in capped(symbols, CEILINGS)}
    assert found == {
        ("pow", "GLIBC_2.2.5"): True,
        ("memcpy", "GLIBC_2.14"): True,
        ("memcpy", "GLIBC_2.2.5"): False,
    }


def test_versions_are_compared_as_numbers() -> None:
    symbols = [StubSymbol(name="f", version=version) for version in ("GLIBC_2.3.4", "GLIBC_2.17", "GLIBC_2.9")]
    (default,) = [one.version for one in capped(symbols, CEILINGS) if one.default]
    assert default == "GLIBC_2.17"


def test_what_exists_only_above_the_ceiling_and_what_is_private_is_gone() -> None:
    symbols = [
        StubSymbol(name="__libc_single_threaded", version="GLIBC_2.32"),
        StubSymbol(name="_rtld_global", version="GLIBC_PRIVATE"),
        StubSymbol(name="wait", version="GLIBCXX_3.4.30"),
        StubSymbol(name="other", version="CXXABI_1.3"),
    ]
    assert capped(symbols, CEILINGS) == ()


def test_a_stub_defines_what_others_ask_of_it_by_version() -> None:
    asked = [
        wants(
            "libcudart.so.12 libc.so.6",
            cudaFree=("libcudart.so.12", "libcudart.so.12"),
            malloc=("libc.so.6", "GLIBC_2.2.5"),
        ),
        wants("libc10.so", defined="c10_thing"),
    ]
    found = missing_symbols(asked, {"libc10.so"})
    assert found == {"libcudart.so.12": [StubSymbol(name="cudaFree", version="libcudart.so.12")]}


def test_symbols_without_a_version_that_no_present_library_defines_go_into_the_first_stub() -> None:
    asked = [
        wants("libnccl.so.2 libcuda.so.1", plain="ncclSend cuInit c10_thing PyList_New"),
        wants(defined="c10_thing"),
    ]
    found = missing_symbols(asked, set())
    assert {name: [one.name for one in symbols] for name, symbols in found.items()} == {
        "libcuda.so.1": ["cuInit", "ncclSend"],
        "libnccl.so.2": [],
    }


def test_a_cpu_torch_needs_no_stub() -> None:
    assert missing_symbols([wants("libc.so.6 libm.so.6 libgomp.so.1 libc10.so")], {"libc10.so"}) == {}


@pytest.mark.parametrize(
    ("machine", "instruction"), [("x86_64", "movl $35,%eax"), ("aarch64", "movz w0,#35")], ids=["x86_64", "aarch64"]
)
def test_a_function_answers_in_its_machines_words(
    tmp_path: Path, fake_runner: Callable[[Callable[[Sequence[str]], str]], Any], machine: str, instruction: str
) -> None:
    assembled: list[str] = []

    def assemble(command: Sequence[str]) -> str:
        assembled.append(Path(command[-1]).read_text(encoding="ascii"))
        return ""

    symbols = [StubSymbol(name="f", version="V_1"), StubSymbol(name="data", is_function=False, size=8)]
    write_stub(tmp_path / "libf.so.1", symbols, Path("/gcc"), fake_runner(assemble), answer=35, machine=machine)

    assert assembled == [
        f".text\n.globl dsops_stub_0\n.type dsops_stub_0,@function\ndsops_stub_0:\n{instruction}\nret\n"
        ".symver dsops_stub_0,f@@V_1,remove\n"
        '.data\n.globl "data"\n.type "data",@object\n"data":\n.zero 8\n.size "data",8\n'
        '.section .note.GNU-stack,"",@progbits\n'
    ]
    assert list(tmp_path.iterdir()) == []
