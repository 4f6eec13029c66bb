from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsops_builder.errors import UsageError
from dsops_builder.matrix import load_matrix
from dsops_builder.model import Exclude, Matrix, Op, TorchOrigin
from dsops_builder.ops import load_ops
from dsops_builder.plan import Facts, Plan, Selection, everything, make_plan
from dsops_prebuilt._variant import GpuArch, Simd

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "tests/data/small"
MATRIX = load_matrix(SMALL / "build_matrix.yaml")
OPS = load_ops(SMALL / "ops")
ALL = everything(MATRIX)


def plan(
    row: str = "1_cu118",
    torch: str | None = None,
    python: str | None = None,
    *,
    facts: Facts = ALL,
    matrix: Matrix = MATRIX,
    ops: tuple[Op, ...] = OPS,
) -> Plan:
    return make_plan(matrix, ops, Selection(row=row, torch=torch, python=python), facts)


def with_excludes(*excludes: Exclude) -> Matrix:
    row = MATRIX.rows["1_cu118"].model_copy(update={"excludes": excludes})
    return MATRIX.model_copy(update={"rows": {"1_cu118": row}})


def test_real_matrix_is_planned_as_recorded() -> None:
    """After a change that is meant: ``python -m dsops_builder plan --anywhere > tests/data/plan.txt``."""
    matrix, ops = load_matrix(ROOT / "build_matrix.yaml"), load_ops(ROOT / "ops")
    plans = [make_plan(matrix, ops, Selection(row=row), everything(matrix)) for row in matrix.rows]

    recorded = (ROOT / "tests/data/plan.txt").read_text(encoding="utf-8")
    assert "\n\n".join(one.render() for one in plans) + "\n" == recorded


def test_host_op_has_a_target_for_each_level_and_cuda_op_one_with_the_arch_list() -> None:
    targets = plan(torch="2.7.1", python="3.11").targets

    assert [target.id for target in targets] == [
        "1_cu118/torch2.7.1/cp311/cpu_adam/ds0.19.8/x86_64_v3",
        "1_cu118/torch2.7.1/cp311/cpu_adam/ds0.19.8/x86_64_v4",
        "1_cu118/torch2.7.1/cp311/fused_adam/ds0.19.8/x86_64",
    ]
    assert [target.archs for target in targets] == [(), (), (GpuArch(8, 0), GpuArch(9, 0, ptx=True))]
    assert targets[2].simd is Simd.X86_64
    assert [(target.build, target.label, target.toolkit, target.cxx11_abi) for target in targets] == [
        (1, "cu118", "11.8", True)
    ] * 3


def test_ids_are_unique() -> None:
    ids = [target.id for row in MATRIX.rows for target in plan(row).targets]

    assert len(ids) == len(set(ids)) == 2 + 11


def test_every_release_of_deepspeed_is_planned() -> None:
    row = MATRIX.rows["1_cpu"].model_copy(update={"deepspeed": ("0.19.8", "0.19.7")})
    matrix = MATRIX.model_copy(update={"rows": {"1_cpu": row}})

    assert [(one.deepspeed, one.simd.value) for one in plan("1_cpu", matrix=matrix).targets] == [
        ("0.19.8", "x86_64_v3"),
        ("0.19.8", "x86_64_v4"),
        ("0.19.7", "x86_64_v3"),
        ("0.19.7", "x86_64_v4"),
    ]


def test_selection_narrows_pairings_and_pythons() -> None:
    assert {(one.torch, one.python) for one in plan().targets} == {
        ("2.6.0", "3.10"),
        ("2.6.0", "3.11"),
        ("2.7.1", "3.11"),
        ("2.7.1", "3.12"),
    }
    assert {(one.torch, one.python) for one in plan(torch="2.6.0").targets} == {("2.6.0", "3.10"), ("2.6.0", "3.11")}
    assert {(one.torch, one.python) for one in plan(python="3.11").targets} == {("2.6.0", "3.11"), ("2.7.1", "3.11")}


UNKNOWN = {
    "row": (
        ("1_cu119", None, None),
        'build_matrix.yaml has no row 1_cu119; it has 1_cpu, 1_cu118, did you mean "1_cu118"?',
    ),
    "nothing near": (("x", None, None), "build_matrix.yaml has no row x; it has 1_cpu, 1_cu118"),
    "torch": (("1_cu118", "2.7", None), '1_cu118 has no torch 2.7; it has 2.6.0, 2.7.1, did you mean "2.7.1"?'),
    "python": (("1_cpu", None, "3.1"), '1_cpu has no python 3.1; it has 3.11, did you mean "3.11"?'),
    "python of that torch": (
        ("1_cu118", "2.7.1", "3.10"),
        '1_cu118 with torch 2.7.1 has no python 3.10; it has 3.11, 3.12, did you mean "3.12"?',
    ),
}


@pytest.mark.parametrize(("selection", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_word_that_the_matrix_does_not_have(selection: tuple[str, str | None, str | None], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(*selection)

    assert str(caught.value) == message


def test_exclude_of_an_op_takes_that_op_only() -> None:
    made = plan(torch="2.6.0", python="3.10")

    assert {target.op.name for target in made.targets} == {"cpu_adam"}
    assert [(cell.id, cell.reason) for cell in made.excluded] == [
        ("1_cu118/torch2.6.0/cp310/fused_adam", "nobody asked for it")
    ]


def test_exclude_without_an_op_takes_the_cell_and_one_without_keys_the_row() -> None:
    python = plan(matrix=with_excludes(Exclude(python="3.11", reason="no wheel")))
    row = plan(matrix=with_excludes(Exclude(reason="retired")))

    assert [cell.id for cell in python.excluded] == ["1_cu118/torch2.6.0/cp311", "1_cu118/torch2.7.1/cp311"]
    assert {target.python for target in python.targets} == {"3.10", "3.12"}
    assert row.targets == ()
    assert {cell.reason for cell in row.excluded} == {"retired"}
    assert len(row.excluded) == 4


def test_interpreter_that_is_missing_is_excluded_with_the_command_that_provides_it() -> None:
    facts = replace(ALL, interpreters={**ALL.interpreters, "3.11": None})
    made = plan(torch="2.7.1", facts=facts)

    assert {target.python for target in made.targets} == {"3.12"}
    assert [(cell.id, cell.reason) for cell in made.excluded] == [
        (
            "1_cu118/torch2.7.1/cp311",
            "no Python 3.11 on this machine; `pyenv install 3.11` or `uv python install 3.11` provides it",
        )
    ]
    assert made.interpreters == (("3.12", Path("python3.12")),)


def test_torch_comes_from_the_index_of_the_label_where_it_answers() -> None:
    made = plan(torch="2.7.1")

    assert made.torch_origins == (
        (
            "2.7.1",
            TorchOrigin(
                requirement="torch==2.7.1+cu118",
                index="https://download.pytorch.org/whl/cu118",
                note="PyTorch's index for cu118",
            ),
        ),
    )
    assert made.torch_origin("2.7.1") is made.torch_origins[0][1]


@pytest.mark.parametrize("indexes", [{}, {"cu118": False, "cpu": True}], ids=["unknown", "no answer"])
def test_torch_comes_from_the_default_index_elsewhere_if_its_abi_is_the_pairings(indexes: dict[str, bool]) -> None:
    made = plan(python="3.11", facts=replace(ALL, indexes=indexes))

    assert dict(made.torch_origins) == {
        "2.6.0": TorchOrigin(
            requirement="torch==2.6.0",
            index=None,
            note="same release's headers from the default index; https://download.pytorch.org/whl/cu118 does not answer",
        ),
        "2.7.1": TorchOrigin(
            requirement="torch==2.7.1",
            index=None,
            note="same release's headers from the default index; https://download.pytorch.org/whl/cu118 does not answer",
        ),
    }


def test_torch_whose_abi_on_the_default_index_is_another_is_excluded() -> None:
    row = MATRIX.rows["1_cu118"]
    pairing = row.pairings[0].model_copy(update={"cxx11_abi": 1})
    rows = {"1_cu118": row.model_copy(update={"pairings": (pairing,), "excludes": ()})}
    made = plan(matrix=MATRIX.model_copy(update={"rows": rows}), facts=replace(ALL, indexes={}))

    assert made.targets == ()
    assert made.torch_origins == ()
    assert [cell.id for cell in made.excluded] == ["1_cu118/torch2.6.0/cp310", "1_cu118/torch2.6.0/cp311"]
    assert made.excluded[0].reason == (
        "https://download.pytorch.org/whl/cu118 does not answer, and torch 2.6.0 of the default index has C++11 ABI 0; "
        "this pairing has ABI 1"
    )


def test_torch_of_excluded_cells_has_no_origin() -> None:
    made = plan(matrix=with_excludes(Exclude(torch="2.6.0", reason="old")))

    assert [torch for torch, _ in made.torch_origins] == ["2.7.1"]


def test_render_shows_targets_exclusions_and_sources() -> None:
    facts = Facts(indexes={}, interpreters={"3.10": Path("/usr/bin/python3.10")})

    assert plan(torch="2.6.0", facts=facts).render().splitlines() == [
        "1_cu118: build 1 of the cu118 payload, 2 targets",
        "  torch  C++11  python  op        deepspeed  code",
        "  2.6.0  abi0   3.10    cpu_adam  0.19.8     x86_64_v3",
        "  2.6.0  abi0   3.10    cpu_adam  0.19.8     x86_64_v4",
        "",
        "excluded",
        "  1_cu118/torch2.6.0/cp310/fused_adam  nobody asked for it",
        "  1_cu118/torch2.6.0/cp311             no Python 3.11 on this machine; `pyenv install 3.11` or `uv python install 3.11` provides it",
        "",
        "from",
        "  compiler  gcc-10 10.2.1, glibc symbols up to 2.28, pinned Debian packages",
        "  toolkit   CUDA 11.8.89 from debian, pinned by sha256",
        "  torch     torch==2.6.0 from the default index (same release's headers from the default index; https://download.pytorch.org/whl/cu118 does not answer)",
        "  python    3.10 at /usr/bin/python3.10",
    ]


def test_render_of_a_row_without_targets_and_without_cuda() -> None:
    assert plan("1_cpu", facts=Facts(indexes={}, interpreters={})).render().splitlines()[:3] == [
        "1_cpu: build 1 of the cpu payload, 0 targets",
        "",
        "excluded",
    ]
    assert "  toolkit   none: no CUDA code in this row" in plan("1_cpu").render().splitlines()


def test_json_has_what_a_workflow_needs() -> None:
    assert plan(torch="2.6.0").to_json() == {
        "id": "1_cu118",
        "label": "cu118",
        "build": 1,
        "torches": ["2.6.0"],
        "pythons": ["3.10", "3.11"],
        "targets": 5,
        "excluded": [{"id": "1_cu118/torch2.6.0/cp310/fused_adam", "reason": "nobody asked for it"}],
    }
