"""The functions that every step of a training calls, made for speed; what they do not take goes the general way.

A step of a small tensor is as fast as its checks. So these are written out for their numbers of tensors, ask a tensor
for nothing twice, and know two cases: all is well, or the general way explains what is not.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import Any, Callable, Optional

from dsops_prebuilt.portable._arguments import Signature
from dsops_prebuilt.portable._library import FAILED, Entry, Library
from dsops_prebuilt.portable._tensors import LOW, Tensors

Function = Callable[..., Any]

LARGE = 2**20
"""Bytes from which the storage's size is asked too, whose microsecond is nothing then. A smaller tensor whose storage
was shrunk, and not released, is read beyond its end, as by the stock op."""
_FOUR = re.compile(r"[iQfd?]{8}rrrr>i")
_THREE = re.compile(r"[iQfd?]+rrr>i")


def make_step(entry: Entry, library: Library, tensors: Tensors, general: Function) -> Optional[Function]:
    """A function for an entry whose arguments are numbers and then three or four tensors; None for any other."""
    for pattern, make in ((_FOUR, _four), (_THREE, _three)):
        if pattern.fullmatch(entry.signature):
            return make(entry, library, tensors, general)
    return None


def _four(entry: Entry, library: Library, tensors: Tensors, general: Function) -> Function:
    """For parameters and gradients of one dtype and two states of another."""
    pack = Struct(Signature.parse(entry.name, entry.signature).layout).pack
    call, failure, handle, facts = library.caller(entry), library.failure, entry.handle, tensors.facts
    # Methods of the class: no object but a tensor passes them, and they are faster than a tensor's own.
    within = tensors.within
    data_ptr, dense, offset = tensors.kind.data_ptr, tensors.kind.is_contiguous, tensors.kind.storage_offset

    def step(  # noqa: PLR0917  eight numbers and four tensors: packing them by name is what makes it fast
        a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, p: Any, q: Any, r: Any, s: Any, /
    ) -> Any:  # fmt: skip
        try:
            kind, state, size, state_size = p.dtype, r.dtype, p.nbytes, r.nbytes
            (one, width), (two, state_width) = facts[kind], facts[state]
            count = size // width
            to_p, to_q, to_r, to_s = data_ptr(p), data_ptr(q), data_ptr(r), data_ptr(s)
            if not (
                p.is_cpu and q.is_cpu and r.is_cpu and s.is_cpu
                and dense(p) and dense(q) and dense(r) and dense(s)
                and q.dtype is kind and s.dtype is state
                and q.nbytes == size and s.nbytes == state_size == count * state_width
                and (
                    (to_p > LOW and to_q > LOW and to_r > LOW and to_s > LOW)
                    or (
                        to_p != offset(p) * width and to_q != offset(q) * width
                        and to_r != offset(r) * state_width and to_s != offset(s) * state_width
                    )
                )
                and (size < LARGE or within(p, q, r, s))
            ):  # fmt: skip
                return general(a, b, c, d, e, f, g, h, p, q, r, s)
            one += count
            two += count
            slots = pack(handle, a, b, c, d, e, f, g, h, to_p, one, to_q, one, to_r, two, to_s, two)
        except Exception:  # noqa: BLE001  an argument that is none may raise anything, and the general way says what
            return general(a, b, c, d, e, f, g, h, p, q, r, s)
        result = call(slots)
        if result == FAILED:
            failure()
        return result

    return step


def _three(entry: Entry, library: Library, tensors: Tensors, general: Function) -> Function:
    """For parameters and gradients of one dtype and one state of another."""
    pack = Struct(Signature.parse(entry.name, entry.signature).layout).pack
    call, failure, handle, facts = library.caller(entry), library.failure, entry.handle, tensors.facts
    within = tensors.within
    data_ptr, dense, offset = tensors.kind.data_ptr, tensors.kind.is_contiguous, tensors.kind.storage_offset

    def step(*args: Any) -> Any:
        try:
            *numbers, p, q, r = args
            kind, size, state_size = p.dtype, p.nbytes, r.nbytes
            (one, width), (two, state_width) = facts[kind], facts[r.dtype]
            count = size // width
            to_p, to_q, to_r = data_ptr(p), data_ptr(q), data_ptr(r)
            if not (
                p.is_cpu and q.is_cpu and r.is_cpu
                and dense(p) and dense(q) and dense(r)
                and q.dtype is kind
                and q.nbytes == size and state_size == count * state_width
                and (
                    (to_p > LOW and to_q > LOW and to_r > LOW)
                    or (
                        to_p != offset(p) * width and to_q != offset(q) * width and to_r != offset(r) * state_width
                    )
                )
                and (size < LARGE or within(p, q, r))
            ):  # fmt: skip
                return general(*args)
            one += count
            slots = pack(handle, *numbers, to_p, one, to_q, one, to_r, two + count)
        except Exception:  # noqa: BLE001  an argument that is none may raise anything, and the general way says what
            return general(*args)
        result = call(slots)
        if result == FAILED:
            failure()
        return result

    return step
