"""Say of a tensor whether a kernel may be given its address, before it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Dict

from dsops_prebuilt.portable._rules import Rule

# Numbers of torch's scalar types (torch/headeronly/core/ScalarType.h), as ops/_portable/include/dsops/scalar.h has them.
_SCALAR_TYPES = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
    "complex32": 8, "complex64": 9, "complex128": 10, "bool": 11, "bfloat16": 15,
}  # fmt: skip


class Tensors:
    """torch's tensors as the kernels see them. Imports torch, which the caller of an op has."""

    def __init__(self) -> None:
        torch = import_module("torch")
        self.kind: Any = torch.Tensor
        self.codes: Dict[Any, int] = {getattr(torch, name): code for name, code in _SCALAR_TYPES.items()}

    def check(self, where: str, rule: Rule, tensors: Dict[str, Any]) -> None:
        """Raise :class:`TypeError` or :class:`ValueError` for the first of ``tensors`` that breaks the rule.

        What has no kernel (float64, say) passes: that is the source's own refusal, a :class:`RuntimeError`.
        """
        size = None
        for name, tensor in tensors.items():
            self.check_one(f"{where}: {name}", tensor)
            size = tensor.numel() if size is None else size
            if tensor.numel() != size:
                first = next(iter(tensors))
                raise ValueError(f"{where}: {name} has {tensor.numel()} elements, and {first} has {size}")
            if name in rule.written and not tensor.is_contiguous():
                raise ValueError(
                    f"{where}: {name} is not contiguous; the kernel would update a copy, and it would never train"
                )
        for one, other in rule.alike:
            if tensors[one].dtype != tensors[other].dtype:
                raise TypeError(f"{where}: {other} is {tensors[other].dtype}, and {one} is {tensors[one].dtype}")

    def check_one(self, where: str, tensor: Any) -> None:
        """Raise for what is no tensor with memory on the CPU; ``where`` begins the message."""
        if not isinstance(tensor, self.kind):
            raise TypeError(f"{where} is {type(tensor).__name__}, not a Tensor")
        if not tensor.is_cpu:
            raise ValueError(f"{where} is on {tensor.device}, and this is the CPU's kernel")
        if str(tensor.layout) != "torch.strided":
            raise ValueError(f"{where} has the layout {tensor.layout}; only a dense tensor has memory to give")
        if tensor.dtype not in self.codes:
            raise TypeError(f"{where} is {tensor.dtype}, which no kernel knows")
        if tensor.numel() and not tensor.data_ptr():
            raise ValueError(f"{where} has {tensor.numel()} elements and no memory; was its storage released?")
