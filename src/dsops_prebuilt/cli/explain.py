"""``dsops explain OP``: which artifact would be loaded on this machine, and why not each of the others."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dsops_prebuilt import _explain
from dsops_prebuilt._errors import NoArtifactError, UsageError, one_of
from dsops_prebuilt._host import Host
from dsops_prebuilt._load import choose, has_reference, installed, refuse_damaged, verify
from dsops_prebuilt._select import on_miss, only_tier

_OPS = """
async_io cpu_adagrad cpu_adam cpu_lion cutlass_ops dc deepspeed_ccl_comm deepspeed_shm_comm evoformer_attn fp_quantizer
fused_adam fused_lamb fused_lion gds inference_core_ops pin_memory quantizer ragged_device_ops ragged_ops random_ltd
spatial_inference stochastic_transformer transformer transformer_inference utils
"""
DEEPSPEED_OPS = frozenset(_OPS.split())
"""``NAME`` of every builder of DeepSpeed 0.19.8 (op_builder/*.py, op_builder/cpu/*.py)."""


def add(verbs: Any) -> None:
    """Add this verb to the ``argparse`` subparsers."""
    verb = verbs.add_parser("explain", help="say which artifact of an op fits this machine, and why the others do not")
    verb.add_argument("op", metavar="OP", help="a DeepSpeed op by its builder's name, such as cpu_adam")
    verb.add_argument(
        "--accelerator",
        choices=("cuda", "cpu"),
        help="whose kernel; by default DS_ACCELERATOR, else cuda where torch has CUDA and a GPU is there, else cpu",
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace, host: Host) -> int:
    """Print the selection; 0 when an artifact or the reference is chosen, else :class:`NoArtifactError`'s code.

    Raises :class:`UsageError` for an op that neither DeepSpeed nor an installed payload knows and for a setting's wrong
    word, and :class:`IntegrityError` where training would: the answer is the one that training gets.
    """
    word, tier = on_miss(host), only_tier(host)
    found = installed()
    known = DEEPSPEED_OPS | {offer.artifact.op for offer in found.offers}
    if options.op not in known:
        raise UsageError(f"{options.op!r} is not an op; {one_of(options.op, sorted(known))}")
    selection = choose(options.op, options.accelerator, host)
    if selection.chosen is not None:
        verify(selection.chosen, found)
    if options.json:
        print(json.dumps(_explain.as_json(selection, host, found), indent=1))
    else:
        print(_explain.text(selection, host, found))
    if selection.chosen is not None:
        return 0
    if word != "jit" and tier != "reference":
        refuse_damaged(found)
    return 0 if has_reference(selection.request, host) else NoArtifactError.exit_code
