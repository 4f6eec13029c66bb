"""What a failed compilation shows."""

from __future__ import annotations

from dsops_builder.compile import diagnostics

NINJA = """\
DS_BUILD_OPS=0
[1/2] g++ -MMD a.o
FAILED: [code=1] /build/temp/a.o
/bin/g++ -c a.cpp -o /build/temp/a.o
/torch/x.h:9:1: warning: old
    9 | a line
      | ^
/build/a.cpp:3:2: error: #error planted
    3 | #error planted
      |  ^
cc1plus: note: something
[2/2] g++ -MMD b.o
b.cpp:1:1: warning: something
FAILED: /build/temp/c.o
/bin/nvcc -c c.cu
c.cu(9): error: identifier "x" is undefined
ninja: build stopped: subcommand failed.
Traceback (most recent call last):
RuntimeError: Error compiling objects for extension
"""


def test_the_compilers_lines_are_shown_and_nothing_around_them() -> None:
    assert diagnostics(NINJA).splitlines() == [
        "/build/a.cpp:3:2: error: #error planted",
        "    3 | #error planted",
        "      |  ^",
        'c.cu(9): error: identifier "x" is undefined',
    ]


def test_a_flood_of_errors_is_cut() -> None:
    flood = "FAILED: a.o\ng++ a.cpp\n" + "a.cpp:1:1: error: again\n" * 500
    assert len(diagnostics(flood).splitlines()) == 60


def test_a_failure_of_another_kind_has_no_compiler_lines() -> None:
    assert diagnostics("Traceback (most recent call last):\nImportError: no torch\n") == ""


def test_a_compiler_that_dies_without_the_word_is_shown_whole() -> None:
    assert diagnostics("FAILED: a.o\ng++ a.cpp\nKilled\nninja: build stopped\n") == "Killed"
