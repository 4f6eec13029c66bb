"""Say of a tensor whether a kernel may be given its address, before it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Dict, Tuple

from dsops_prebuilt.portable._rules import Rule

# Numbers of torch's scalar types (torch/headeronly/core/ScalarType.h and ops/_portable/include/dsops/scalar.h), and the
# bytes of an element.
_SCALAR_TYPES = {
    "uint8": (0, 1), "int8": (1, 1), "int16": (2, 2), "int32": (3, 4), "int64": (4, 8), "float16": (5, 2),
    "float32": (6, 4), "float64": (7, 8), "complex32": (8, 4), "complex64": (9, 8), "complex128": (10, 16),
    "bool": (11, 1), "bfloat16": (15, 2),
}  # fmt: skip
_TYPE_SHIFT = 56
"""A slot has the number of elements in its low bytes, and the scalar type in the highest (``table.h``)."""

LOW = 2**38
"""The address of a tensor whose storage was released is its offset, and no offset is as large as this. Where Python is
no PIE (Debian's and Ubuntu's are none) an address may be smaller: then it is compared with the offset."""


class Tensors:
    """torch's tensors as the kernels see them. Imports torch, which the caller of an op has."""

    def __init__(self) -> None:
        torch = import_module("torch")
        self.kind: Any = torch.Tensor
        self.facts: Dict[Any, Tuple[int, int]] = {
            getattr(torch, name): (code << _TYPE_SHIFT, size) for name, (code, size) in _SCALAR_TYPES.items()
        }
        """By dtype: the scalar type where a slot has it, and the bytes of an element."""
        self._strided: Any = torch.strided

    def slots(self, tensor: Any) -> Tuple[int, int]:
        """The slots of a contiguous tensor: its address, then its number of elements and scalar type."""
        return tensor.data_ptr(), tensor.numel() + self.facts[tensor.dtype][0]

    def within(self, *tensors: Any) -> bool:
        """Whether contiguous tensors lie inside their storages, which may have been shrunk."""
        return all(
            tensor.storage_offset() * tensor.element_size() + tensor.nbytes <= tensor.untyped_storage().nbytes()
            for tensor in tensors
        )

    def check(self, where: str, rule: Rule, tensors: Tuple[Any, ...]) -> None:
        """Raise :class:`TypeError` or :class:`ValueError` for the first of ``tensors`` that breaks the rule.

        What has no kernel (float64, say) passes: that is the source's own refusal, a :class:`RuntimeError`.
        """
        if not self._plain(rule, tensors):
            self._explain(where, rule, tensors)

    def _plain(self, rule: Rule, tensors: Tuple[Any, ...]) -> bool:
        """Whether nothing is to be said of these tensors, at a glance."""
        dtypes = dict(zip(rule.tensors, (getattr(tensor, "dtype", None) for tensor in tensors)))
        try:
            size = self.kind.numel(tensors[0])
            return all(dtypes[one] is dtypes[other] for one, other in rule.alike) and all(
                tensor.is_cpu
                and tensor.layout is self._strided
                and tensor.dtype in self.facts
                and self.kind.numel(tensor) == size
                and self.kind.is_contiguous(tensor)
                and self._has_memory(tensor)
                for tensor in tensors
            )
        except (AttributeError, RuntimeError, TypeError):
            return False

    def _has_memory(self, tensor: Any) -> bool:
        return self.kind.data_ptr(tensor) != 0 and self.within(tensor)

    def _explain(self, where: str, rule: Rule, tensors: Tuple[Any, ...]) -> None:
        size = None
        for name, tensor in zip(rule.tensors, tensors):
            self.check_one(f"{where}: {name}", tensor)
            size = tensor.numel() if size is None else size
            if tensor.numel() != size:
                raise ValueError(f"{where}: {name} has {tensor.numel()} elements, and {rule.tensors[0]} has {size}")
            if name in rule.written and not tensor.is_contiguous():
                raise ValueError(
                    f"{where}: {name} is not contiguous; the kernel would update a copy, and it would never train"
                )
        for first, second in rule.alike:
            one, other = (tensors[rule.tensors.index(name)] for name in (first, second))
            if one.dtype != other.dtype:
                raise TypeError(f"{where}: {second} is {other.dtype}, and {first} is {one.dtype}")

    def check_one(self, where: str, tensor: Any) -> None:
        """Raise for what is no tensor with memory on the CPU; ``where`` begins the message."""
        if not isinstance(tensor, self.kind):
            raise TypeError(f"{where} is {type(tensor).__name__}, not a Tensor")
        if not tensor.is_cpu:
            raise ValueError(f"{where} is on {tensor.device}, and this is the CPU's kernel")
        if str(tensor.layout) != "torch.strided":
            raise ValueError(f"{where} has the layout {tensor.layout}; only a dense tensor has memory to give")
        if tensor.dtype not in self.facts:
            raise TypeError(f"{where} is {tensor.dtype}, which no kernel knows")
        try:
            missing = self._missing(tensor)
        except RuntimeError:  # a tensor of torch.func, say, which stands for others
            raise ValueError(f"{where} has no memory of its own") from None
        if missing:
            raise ValueError(f"{where} is {missing} bytes longer than its storage; was the storage released?")

    def _missing(self, tensor: Any) -> int:
        """How many bytes of the tensor lie behind the end of its storage, which was shrunk, or has no memory at all."""
        size = self.facts[tensor.dtype][1]
        if not tensor.numel():
            return 0
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
        end: int = (tensor.storage_offset() + last + 1) * size
        storage = tensor.untyped_storage()
        return max(0, end - (storage.nbytes() if storage.data_ptr() else 0))
