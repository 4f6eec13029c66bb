from __future__ import annotations

import ctypes
import re
import struct
from array import array
from decimal import Decimal
from typing import Any

import pytest

from dsops_prebuilt.portable._arguments import Signature, slots_of
from dsops_prebuilt.portable._library import Library
from dsops_prebuilt.portable._rules import RULES, check_values
from dsops_prebuilt.portable._steps import make_step

SUBMIT = "!Qiq[f][f][f][f][f][B]>v"
# Every signature of DeepSpeed 0.14.4 to 0.19.8, and how many slots its arguments take behind the entry's.
SIGNATURES = {
    "adam_update": ("iQfffff?rrrr>i", 16),
    "adagrad_update": ("iQfffrrr>i", 11),
    "lion_update": ("iQffffrrr>i", 12),
    "create_adam": ("ifffff??>i", 8),
    "destroy_adam": ("i>i", 1),
    "multi_tensor_adam": ("it[[t]]ffffiiif>v", 14),
    "zenflow_adam_create": ("i[i]>i", 3),
    "zenflow_adam_register_group": ("itttttttt>v", 25),
    "zenflow_adam_ctrl_size": (">q", 0),
    "zenflow_adam_submit": (SUBMIT, 15),
    "zenflow_adam_wait": ("!Qd>?", 2),
}


class Number:
    """An integer for whoever asks with __int__, and no other."""

    def __int__(self) -> int:
        return 3


class Index:
    """An integer by its __index__."""

    def __index__(self) -> int:
        return 3


class Broken:
    """Looks like a number, until it is asked."""

    def __index__(self) -> int:
        raise KeyError(3)

    __float__ = __bool__ = __index__


def convert(letter: str, value: Any) -> Any:
    return Signature.parse("f", f"{letter}>v").convert([value])[0]


@pytest.mark.parametrize(("text", "slots"), SIGNATURES.values(), ids=list(SIGNATURES))
def test_a_call_has_the_entry_and_the_slots_of_its_arguments(text: str, slots: int) -> None:
    assert struct.calcsize(Signature.parse("f", text).layout) == 8 * (1 + slots)


def test_a_signature_is_taken_apart_and_written_out() -> None:
    signature = Signature.parse("submit", SUBMIT)
    assert signature.letters == ("Q", "i", "q", "[f]", "[f]", "[f]", "[f]", "[f]", "[B]")
    assert str(signature) == (
        "submit(int, int, int, list[float], list[float], list[float], list[float], list[float], list[int])"
    )
    assert str(Signature.parse("step", "i?r[[t]]>i")) == "step(int, bool, Tensor, list[list[Tensor]])"


@pytest.mark.parametrize(
    ("text", "number", "answer"), [("i>v", 0, None), ("i>?", 1, True), ("i>?", 0, False), ("i>i", -1, -1)], ids=str
)
def test_an_answer_has_the_type_that_it_was_declared_with(text: str, number: int, answer: Any) -> None:
    assert Signature.parse("f", text).answered(number) is answer


@pytest.mark.parametrize(
    ("letter", "value", "converted"),
    [
        ("i", True, 1),
        ("i", -(2**31), -(2**31)),
        ("i", Index(), 3),
        ("i", Number(), 3),
        ("i", Decimal("3.9"), 3),
        ("q", 2**63 - 1, 2**63 - 1),
        ("Q", 2**64 - 1, 2**64 - 1),
        ("B", 255, 255),
        ("f", 1, 1.0),
        ("f", Index(), 3.0),
        ("d", Decimal("0.5"), 0.5),
        ("?", None, False),
        ("?", 2, True),
        ("?", 0.0, False),
        ("[i]", (1, 2), [1, 2]),
        ("[f]", iter([1]), [1.0]),
        ("[B]", bytearray(b"a"), [97]),
        ("[[i]]", [[1], ()], [[1], []]),
    ],
    ids=repr,
)
def test_a_value_is_converted_as_pybind11_converts_it(letter: str, value: Any, converted: Any) -> None:
    result = convert(letter, value)
    assert (result, type(result)) == (converted, type(converted))


@pytest.mark.parametrize(
    ("letter", "value", "message"),
    [
        ("i", 1.0, "a float is no int"),
        ("i", "1", "'str' object cannot be interpreted as an integer"),
        ("i", 2**31, "the number is out of range"),
        ("q", 2**63, "the number is out of range"),
        ("Q", -1, "the number is out of range"),
        ("B", 256, "the number is out of range"),
        ("i", Broken(), "3"),
        ("f", "1", "str is no float"),
        ("f", None, "NoneType is no float"),
        ("f", 10**400, "int too large to convert to float"),
        ("d", Broken(), "3"),
        ("?", "x", "str is no bool"),
        ("?", [], "list is no bool"),
        ("?", Broken(), "3"),
        ("[i]", "12", "str is no list"),
        ("[i]", b"12", "bytes is no list"),
        ("[i]", {1: 2}, "dict is no list"),
        ("[i]", 1, "'int' object is not iterable"),
        ("[i]", [1.0], "a float is no int"),
        ("[[i]]", [1], "'int' object is not iterable"),
    ],
    ids=repr,
)
def test_a_value_of_another_kind_is_a_type_error_that_names_its_place(letter: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match="argument 1") as caught:
        convert(letter, value)
    assert str(caught.value).partition(": argument 1: ")[2] == message


def test_another_number_of_arguments_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=re.escape("destroy(int) was called with 2 arguments")):
        Signature.parse("destroy", "i>i").convert([1, 2])


def no_tensor(letter: str, value: Any) -> tuple[int, ...]:
    return (len(letter), value)


def read(address: int, count: int, code: str) -> list[Any]:
    return array(code, ctypes.string_at(address, 8 * count)).tolist()


@pytest.mark.parametrize(
    ("letter", "values", "code"),
    [("[i]", [1, -2], "q"), ("[f]", [0.5, 2.0], "d"), ("[Q]", [2**64 - 1], "Q"), ("[?]", [True, False], "q")],
    ids=str,
)
def test_a_list_is_laid_out_in_memory_that_is_held(letter: str, values: list[Any], code: str) -> None:
    held: list[Any] = []
    address, count = slots_of(letter, values, no_tensor, held)
    assert (count, len(held)) == (len(values), 1)
    assert read(address, count, code) == values


def test_lists_of_lists_point_at_lists() -> None:
    held: list[Any] = []
    address, count = slots_of("[[t]]", [[7, 8], [], [9]], no_tensor, held)
    outer = read(address, 2 * count, "Q")
    assert outer[1::2] == [2, 0, 1]
    assert read(outer[0], 4, "Q") == [1, 7, 1, 8]  # two slots each, as no_tensor gives them
    assert len(held) == 4


def test_a_number_is_its_own_slot() -> None:
    assert slots_of("i", 3, no_tensor, []) == (3,)
    assert slots_of("r", 3, no_tensor, []) == (1, 3)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_speaks_of_tensors_that_it_names(name: str) -> None:
    rule = RULES[name]
    assert set(rule.written) <= set(rule.tensors)
    assert {word for pair in rule.alike for word in pair} <= set(rule.tensors)
    assert len(set(rule.tensors)) == len(rule.tensors)


def submitted(*, address: int = 8, state: int = 0, groups: int = 1, corrections: int = 1) -> list[Any]:
    return [address, state, 1, *[[0.1] * groups] * 5, [1] * corrections]


@pytest.mark.parametrize(
    ("name", "text", "values", "message"),
    [
        ("zenflow_adam_ctrl_exit", "!Q>v", [0], "the control block's address is 0"),
        ("zenflow_adam_run_worker", "!iQ>v", [1, 0], "the control block's address is 0"),
        ("zenflow_adam_submit", SUBMIT, submitted(address=0), "the control block's address is 0"),
        ("zenflow_adam_submit", SUBMIT, submitted(state=2), "now_state is 2; there are two buffers"),
        ("zenflow_adam_submit", SUBMIT, submitted(groups=2), "lists of [1, 2] items; one length, at most 1024"),
        (
            "zenflow_adam_submit",
            SUBMIT,
            submitted(groups=1025, corrections=1025),
            "lists of [1025] items; one length, at most 1024",
        ),
        (
            "multi_tensor_adam",
            "it[[t]]ffffiiif>v",
            [1, None, [], 0.1, 0.9, 0.9, 0.1, 1, 2, 1, 0.0],
            "mode is 2; 0 is Adam with L2, 1 is AdamW",
        ),
    ],
    ids=["exit", "worker", "submit", "state", "lengths", "groups", "mode"],
)
def test_what_the_sources_take_for_granted_is_asked(name: str, text: str, values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        check_values(name, Signature.parse(name, text).letters, values)
    assert str(caught.value) == f"{name}: {message}"


def test_a_step_of_0_is_no_address() -> None:
    check_values("adam_update", ("i", "Q"), [0, 0])
    check_values("zenflow_adam_submit", Signature.parse("f", SUBMIT).letters, submitted(groups=1024, corrections=1024))


def test_a_file_that_is_no_portable_library_is_an_import_error() -> None:
    with pytest.raises(ImportError) as caught:
        Library("libm.so.6")
    assert str(caught.value) == "libm.so.6: no library of the portable tier, as it exports no dsops_abi"
    with pytest.raises(OSError, match="no-such-file"):
        Library("/no-such-file.so")


def test_only_a_step_is_made_for_speed() -> None:
    class Other:
        """An entry with no step's signature."""

        signature = "i>i"

    nothing: Any = None
    entry: Any = Other
    assert make_step(entry, nothing, nothing, print) is None
