from __future__ import annotations

import io
from pathlib import Path

import pytest

from dsops_builder.model import Wheel
from dsops_builder.report import Report, seconds, size

WHEEL = Wheel(path=Path("dist/a-1-py3-none-any.whl"), sha256="ab" * 32, size=246_000, seconds=12.34)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(
    *, color: bool | None = None, github: bool = False, step_summary: Path | None = None, terminal: bool = False
) -> tuple[Report, io.StringIO, io.StringIO]:
    stdout, stderr = io.StringIO(), Terminal() if terminal else io.StringIO()
    made = Report(stdout=stdout, stderr=stderr, color=color, github=github, step_summary=step_summary)
    return made, stdout, stderr


def test_step_says_what_begins_and_how_long_it_took() -> None:
    told, stdout, stderr = report()
    with told.step("compile"), told.step("cpu_adam"):
        told.echo("gcc ...")

    lines = stderr.getvalue().splitlines()
    assert lines[:2] == ["compile ...", "  cpu_adam ..."]
    assert lines[2:] == ["  cpu_adam: done in 0.0 s", "compile: done in 0.0 s"]
    assert stdout.getvalue() == ""


def test_step_that_fails_says_so_and_lets_the_error_through() -> None:
    told, _, stderr = report()
    with pytest.raises(ValueError, match="broken"), told.step("compile"):
        raise ValueError("broken")

    assert stderr.getvalue().splitlines() == ["compile ...", "compile: failed after 0.0 s"]


def test_github_folds_outer_steps_and_keeps_the_output_of_commands() -> None:
    told, stdout, stderr = report(github=True)
    with told.step("compile"), told.step("cpu_adam"):
        told.echo("gcc [options] ...")

    assert stderr.getvalue().splitlines() == [
        "::group::compile",
        "  cpu_adam ...",
        "gcc [options] ...",
        "  cpu_adam: done in 0.0 s",
        "::endgroup::",
        "compile: done in 0.0 s",
    ]
    assert stdout.getvalue() == ""


def test_github_closes_the_fold_of_a_step_that_fails_before_the_error() -> None:
    told, _, stderr = report(github=True)
    with pytest.raises(ValueError, match="broken"), told.step("compile"):
        raise ValueError("broken")
    told.error("broken")

    assert stderr.getvalue().splitlines() == [
        "::group::compile",
        "::endgroup::",
        "compile: failed after 0.0 s",
        "error: broken",
    ]


def test_wheels_are_a_table_for_people_and_paths_for_programs() -> None:
    told, stdout, stderr = report()
    told.wheels([WHEEL])

    heading, row = (line.split() for line in stderr.getvalue().splitlines())
    assert heading == ["file", "size", "time", "sha256"]
    assert row == ["a-1-py3-none-any.whl", "246", "kB", "12.3", "s", "ab" * 32]
    assert stdout.getvalue() == "dist/a-1-py3-none-any.whl\n"


def test_narrow_terminal_folds_the_sha256_and_loses_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    told, _, stderr = report(terminal=True, color=False)
    told.wheels([WHEEL])

    assert stderr.getvalue().replace("\n", " ").count("ab") >= 25
    assert "".join(line.split()[-1] for line in stderr.getvalue().splitlines()[1:] if line.strip()).endswith("ab" * 4)
    assert "…" not in stderr.getvalue()


def test_step_summary_is_appended_as_markdown(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    told, _, _ = report(step_summary=file)
    told.wheels([WHEEL])

    assert file.read_text() == (
        "before\n| file | size | time | sha256 |\n|---|--:|--:|---|\n"
        f"| a-1-py3-none-any.whl | 246 kB | 12.3 s | `{'ab' * 32}` |\n"
    )


def test_error_is_one_block_and_its_words_are_not_markup() -> None:
    told, stdout, stderr = report()
    told.error("rows[0]: [bold]\nbuild_matrix.yaml:3: x\n\nend")

    assert stderr.getvalue() == "error: rows[0]: [bold]\n  build_matrix.yaml:3: x\n\n  end\n"
    assert stdout.getvalue() == ""


def test_long_lines_are_not_wrapped() -> None:
    told, _, stderr = report()
    told.say("x" * 500)

    assert stderr.getvalue() == "x" * 500 + "\n"


@pytest.mark.parametrize(
    ("env", "colored"),
    [
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({}, False),
    ],
    ids=["forced", "none", "none wins", "no terminal"],
)
def test_colour(env: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    Report.for_process({**env, "TERM": "xterm"}).error("x")

    assert ("\x1b[" in stderr.getvalue()) is colored


def test_no_color_leaves_no_escape_on_a_terminal() -> None:
    told, _, stderr = report(color=False, terminal=True)
    told.error("x")

    assert stderr.getvalue() == "error: x\n"


def test_terminal_shows_the_output_of_a_command_in_passing() -> None:
    told, _, stderr = report(color=True, terminal=True)
    with told.step("compile"):
        told.echo("[1/3] gcc ...")
    told.echo("nobody listens")

    assert "compile" in stderr.getvalue()
    assert "nobody listens" not in stderr.getvalue()


def test_github_variables_are_read_from_the_environment_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.md"
    told = Report.for_process({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(file)})
    with told.step("compile"):
        pass
    told.wheels([WHEEL])

    captured = capsys.readouterr()
    assert captured.err.startswith("::group::compile\n")
    assert captured.out == "dist/a-1-py3-none-any.whl\n"
    assert file.exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 00 s"), (125.4, "2 min 05 s"), (3599.6, "60 min 00 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (246_400, "246 kB"), (9_660_000, "9.7 MB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
