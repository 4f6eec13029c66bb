"""Make the functions of an op's module out of a library's table: the stock module's arguments, checks and errors."""

from __future__ import annotations

import re
from itertools import count
from struct import Struct
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from dsops_prebuilt.portable._arguments import Signature, answered, in_memory
from dsops_prebuilt.portable._library import FAILED, Entry, Library
from dsops_prebuilt.portable._rules import RULES, Rule
from dsops_prebuilt.portable._tensors import Tensors

Function = Callable[..., Any]

_UPDATE = re.compile(r"(?P<numbers>[^rt\[]+)r+>i")
"""Numbers, the optimizer's id first, then tensors: what every step of a training calls."""
_GROUPS = 1024
"""ZEN_MAX_GROUPS of csrc/adam/cpu_adam_impl.cpp (0.19.3 to 0.19.8), which ``zenflow_adam_submit`` does not check."""
_MODES = (0, 1)
"""``mode`` of ``multi_tensor_adam`` is an index into an array of two (csrc/cpu/adam/fused_adam.cpp, 0.19.6)."""


def make_functions(library: Library) -> Dict[str, Function]:
    """The functions of every entry of the library, by name."""
    maker = _Maker(library)
    return {entry.name: maker.function(entry) for entry in library.entries}


class _Maker:
    """What the functions of one library share: the optimizers that exist, and the tensors that C++ still holds."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tensors = Tensors()
        self._ids: Set[int] = set()
        self._kept: Dict[int, Any] = {}
        self._tokens = count(1)

    def function(self, entry: Entry) -> Function:
        """The Python function of an entry. Positional only, like a function of pybind11 whose arguments have no name."""
        rule, numbers = RULES.get(entry.name), _UPDATE.fullmatch(entry.signature)
        if rule is not None and numbers is not None:
            made = self._update(entry, rule, len(numbers["numbers"]))
        else:
            made = self._general(entry)
        made.__name__ = made.__qualname__ = entry.name
        made.__doc__ = f"{Signature.of(entry)}: DeepSpeed's function of this name."
        return made

    def _update(self, entry: Entry, rule: Rule, first: int) -> Function:
        signature, width = Signature.of(entry), len(rule.tensors)
        pack = Struct("".join(["<", *(form.format[1:] for form in signature.formats)]))
        call, handle, ids = self._library.caller(entry.signature), entry.handle, self._ids
        kind, codes, size = self._tensors.kind, self._tensors.codes, first + width
        alike = [(rule.tensors.index(one) * 3 + 2, rule.tensors.index(other) * 3 + 2) for one, other in rule.alike]

        def update(*args: Any) -> int:
            slots: List[int] = []
            for tensor in args[first:]:
                if not (isinstance(tensor, kind) and tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in codes):
                    break
                slots += (tensor.data_ptr(), tensor.numel(), codes[tensor.dtype])
            if (
                len(args) != size
                or args[0] not in ids
                or slots[1::3].count(slots[1] if slots else 0) != width
                or (0 in slots[::3] and slots[1])
                or any(slots[one] != slots[other] for one, other in alike)
            ):
                return update(*self._fitting(signature, rule, first, args))
            result = call(handle, signature.pack(pack, *args[:first], *slots))
            if result == FAILED:
                self._library.failure()
            return result

        return update

    def _fitting(self, signature: Signature, rule: Rule, first: int, args: Tuple[Any, ...]) -> Tuple[Any, ...]:
        """The arguments with a contiguous copy of each tensor that is only read. Raises for what is wrong with them."""
        signature.count(args)
        self._require(signature, args[0])
        tensors = dict(zip(rule.tensors, args[first:]))
        self._tensors.check(signature.name, rule, tensors)
        return (*args[:first], *(tensor.contiguous() for tensor in tensors.values()))

    def _require(self, signature: Signature, optimizer: Any) -> None:
        """The sources follow a null pointer for an id that was never created, or was destroyed."""
        if optimizer not in self._ids:
            raise ValueError(f"{signature.name}: there is no optimizer {optimizer!r}; it was not created, or destroyed")

    def _general(self, entry: Entry) -> Function:
        """A function of any signature, which may keep tensors that were passed by value."""
        signature = Signature.of(entry)
        formats, call = signature.formats, self._library.caller(entry.signature)
        check: Optional[Callable[[Signature, Tuple[Any, ...]], None]] = getattr(self, f"_check_{entry.name}", None)
        lets_go = "t" in entry.signature or entry.name.endswith("_destroy")

        def function(*args: Any) -> Any:
            signature.count(args)
            self._check_addresses(signature, args)
            if check is not None:
                check(signature, args)
            held: List[Any] = []
            packed = zip(formats, signature.letters, args)
            try:
                slots = b"".join(self._slots(signature, form, letter, value, held) for form, letter, value in packed)
                result = call(entry.handle, slots)
                if result == FAILED:
                    self._library.failure()
            finally:
                if lets_go:
                    self._let_go()
            self._note(entry.name, args)
            return answered(signature.answer, result)

        return function

    def _slots(self, signature: Signature, form: Struct, letter: str, value: Any, held: List[Any]) -> bytes:
        """The slots of one argument; what they point at is put into ``held``, or kept until C++ has let it go."""
        if letter[0] == "[":
            items, inner = signature.sequence(value), letter[1:-1]
            one = Signature(signature.name, (inner,), "v").formats[0]
            slots = b"".join(self._slots(signature, one, inner, item, held) for item in items)
            return form.pack(in_memory(slots, held), len(items))
        if letter != "t":
            return signature.pack(form, value)
        self._tensors.check_one(f"{signature.name}: an argument", value)
        tensor, token = value.contiguous(), next(self._tokens)
        self._kept[token] = tensor
        return form.pack(tensor.data_ptr(), tensor.numel(), self._tensors.codes[tensor.dtype] | token << 8)

    def _let_go(self) -> None:
        for token in self._library.released():
            self._kept.pop(token, None)

    def _note(self, name: str, args: Tuple[Any, ...]) -> None:
        """Keep the ids of the optimizers that exist: the first argument of ``create_`` and ``destroy_``."""
        if name.startswith("create_"):
            self._ids.add(args[0])
        elif name.startswith("destroy_"):
            self._ids.discard(args[0])

    def _check_addresses(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        """ZenFlow's control block arrives as an address: the only unsigned number of its functions."""
        for letter, value in zip(signature.letters, args):
            if letter == "Q" and value == 0:
                raise ValueError(f"{signature.name}: the control block's address is 0")

    def _check_zenflow_adam_create(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        self._require(signature, args[0])

    def _check_zenflow_adam_register_group(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        rule = RULES[signature.name]
        self._tensors.check(signature.name, rule, dict(zip(rule.tensors, args[1:])))

    def _check_zenflow_adam_submit(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        lengths = {len(signature.sequence(values)) for values in args[3:]}
        if len(lengths) != 1 or max(lengths) > _GROUPS:
            raise ValueError(f"{signature.name}: lists of {sorted(lengths)} items; one length, at most {_GROUPS}")

    def _check_multi_tensor_adam(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        if args[8] not in _MODES:
            raise ValueError(f"{signature.name}: mode is {args[8]!r}; 0 is Adam with L2, 1 is AdamW")
        self._check_lists(signature, args)

    def _check_multi_tensor_lion(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        self._check_lists(signature, args)

    def _check_lists(self, signature: Signature, args: Tuple[Any, ...]) -> None:
        rule = RULES[signature.name]
        lists = [signature.sequence(tensors) for tensors in signature.sequence(args[2])]
        if len(lists) != len(rule.tensors) or len({len(tensors) for tensors in lists}) != 1:
            found = f"{len(lists)} lists of {[len(tensors) for tensors in lists]} tensors"
            raise ValueError(f"{signature.name}: {found}; one list each of {', '.join(rule.tensors)} is needed")
        for group in zip(*lists):
            self._tensors.check(signature.name, rule, dict(zip(rule.tensors, group)))
