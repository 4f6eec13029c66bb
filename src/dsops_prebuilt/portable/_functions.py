"""Make the functions of an op's module out of a library's table: the stock module's arguments, checks and errors."""

from __future__ import annotations

from itertools import count
from struct import Struct
from typing import Any, Callable, Dict, List, Sequence, Tuple

from dsops_prebuilt.portable._arguments import Signature, slots_of
from dsops_prebuilt.portable._library import FAILED, Entry, Library
from dsops_prebuilt.portable._rules import RULES, by_parameter, check_values
from dsops_prebuilt.portable._steps import Function, make_step
from dsops_prebuilt.portable._tensors import Tensors


def make_functions(library: Library) -> Dict[str, Function]:
    """The functions of every entry of the library, by name.

    They are positional only, like a function of pybind11 whose arguments have no name.
    """
    maker = _Maker(library)
    return {entry.name: maker.function(entry) for entry in library.entries}


class _Maker:
    """What the functions of one library share: the tensors that C++ holds beyond a call, by token."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tensors = Tensors()
        self._kept: Dict[int, Any] = {}
        self._tokens = count(1)

    def function(self, entry: Entry) -> Function:
        """The Python function of an entry."""
        general = self._general(entry)
        made = make_step(entry, self._library, self._tensors, general) or general
        made.__name__ = made.__qualname__ = entry.name
        made.__doc__ = f"{Signature.parse(entry.name, entry.signature)}: DeepSpeed's function of this name."
        return made

    def _general(self, entry: Entry) -> Function:
        """A function of any signature, which may keep tensors that were passed by value."""
        signature = Signature.parse(entry.name, entry.signature)
        pack, call, letters = Struct(signature.layout).pack, self._library.caller(entry), signature.letters
        lets_go = "t" in entry.signature or entry.name.endswith("_destroy")

        def function(*args: Any) -> Any:
            values = signature.convert(args)
            self._check(signature, values)
            held: List[Any] = []
            passed: Dict[int, Any] = {}
            tensor = self._holder(held, passed)
            flat = [slot for letter, value in zip(letters, values) for slot in slots_of(letter, value, tensor, held)]
            slots = pack(entry.handle, *flat)
            self._kept.update(passed)
            try:
                result = call(slots)
                if result == FAILED:
                    self._library.failure()
            finally:
                if lets_go:
                    self._let_go()
            return signature.answered(result)

        return function

    def _check(self, signature: Signature, values: Sequence[Any]) -> None:
        """Raise for tensors, and numbers, that the sources would take for granted."""
        name, rule = signature.name, RULES.get(signature.name)
        check_values(signature.name, signature.letters, values)
        groups = by_parameter(name, rule, values) if "[[t]]" in signature.letters and rule else []
        single = tuple(value for letter, value in zip(signature.letters, values) if letter in "rt")
        if rule and not groups and len(single) == len(rule.tensors):
            groups = [single]
        else:
            for tensor in single:
                self._tensors.check_one(f"{name}: an argument", tensor)
        for group in groups:
            if rule:
                self._tensors.check(name, rule, group)

    def _holder(self, held: List[Any], passed: Dict[int, Any]) -> Callable[[str, Any], Tuple[int, ...]]:
        """What gives the slots of a tensor, and holds on to it: during the call, or as long as C++ holds its token."""

        def tensor(letter: str, value: Any) -> Tuple[int, ...]:
            dense = value.contiguous()
            if letter == "r":
                held.append(dense)
                return self._tensors.slots(dense)
            token = next(self._tokens)
            passed[token] = dense
            return (*self._tensors.slots(dense), token)

        return tensor

    def _let_go(self) -> None:
        for token in self._library.released():
            self._kept.pop(token, None)
