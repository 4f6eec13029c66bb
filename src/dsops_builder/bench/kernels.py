"""Time a step of Adam by tier: stock and portable of one SIMD level, and torch's fused kernel, on the same tensors.

Runs in a clean environment, ``python kernels.py REPORT.json``; variants take turns in random order.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

_SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)
_SECONDS = 1.5
"""How long a variant is measured, at most; never fewer than _ROUNDS times."""
_ROUNDS = 9
# Bytes of a step for each parameter: read parameter, gradient and two moments, write all but the gradient.
_STATE_BYTES = 4
_TRAFFIC = {"float32": 28, "float16": 2 * 3 + _STATE_BYTES * 4, "bfloat16": 2 * 3 + _STATE_BYTES * 4}
# lr, betas, eps and weight decay; AdamW (and its bias correction), without a line on stdout.
_HYPER = (1e-6, 0.9, 0.999, 1e-8, 0.01)
_ADAMW = (True, False)
_HEAD = ("dtype", "parameters", "threads", "stock us", "portable us", "portable/stock", "torch/portable", "bandwidth")


def main(report_path: str) -> None:
    """Measure and write the report. Whatever fails is raised."""
    import torch

    modules = _modules()
    rows: list[dict[str, Any]] = []
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        torch.set_num_threads(threads)
        cells = ((dtype, size) for dtype in _TRAFFIC for size in _SIZES)
        rows += (
            {"threads": threads, "dtype": dtype, "parameters": size, **_cell(modules, dtype, size)}
            for dtype, size in cells
        )
    report = {"simd": str(modules["simd"]), "torch": torch.__version__, "rows": rows}
    with open(report_path, "w", encoding="utf-8") as stream:
        json.dump(report, stream)


def _modules() -> dict[str, Any]:
    """The stock and the portable module of the highest level that both have here."""
    from dsops_prebuilt._host import detect
    from dsops_prebuilt._load import choose, installed, open_offer

    offers = [verdict.offer for verdict in choose("cpu_adam", "cpu", detect()).verdicts if verdict.accepted]
    by_tier = {tier: {o.artifact.simd: o for o in offers if o.artifact.tier == tier} for tier in ("stock", "portable")}
    simd = max(set(by_tier["stock"]) & set(by_tier["portable"]), key=lambda level: level.rank)
    return {"simd": simd, **{tier: open_offer(by_tier[tier][simd], installed()) for tier in by_tier}}


def _cell(modules: dict[str, Any], dtype: str, size: int) -> dict[str, Any]:
    import torch

    kind = getattr(torch, dtype)
    parameter = torch.randn(size).to(kind)
    gradient = torch.randn(size).to(kind)
    mean, square = torch.randn(size) * 1e-2, torch.rand(size) + 1e-3
    variants: dict[str, Callable[[], Any]] = {}
    for tier in ("stock", "portable"):
        modules[tier].create_adam(0, *_HYPER, *_ADAMW)
        variants[tier] = _update(modules[tier].adam_update, parameter, gradient, mean, square)
    if dtype == "float32":
        variants["torch"] = _fused(parameter, gradient, mean, square)
    times = {name: spread(taken) for name, taken in _interleaved(variants).items()}
    copy = spread(_interleaved({"add": lambda: torch.add(mean, square, out=mean)})["add"])["p10"]
    bandwidth = size * 3 * _STATE_BYTES / copy
    cell: dict[str, Any] = {
        "microseconds": {name: {key: round(value * 1e6, 2) for key, value in of.items()} for name, of in times.items()},
        "portable_over_stock": round(times["stock"]["median"] / times["portable"]["median"], 3),
        "bandwidth_fraction": round(size * _TRAFFIC[dtype] / times["portable"]["median"] / bandwidth, 3),
    }
    if "torch" in times:
        cell["torch_over_portable"] = round(times["torch"]["median"] / times["portable"]["median"], 3)
    return cell


def _update(function: Any, *tensors: Any) -> Callable[[], Any]:
    return lambda: function(0, 7, *_HYPER, _ADAMW[0], *tensors)


def _fused(parameter: Any, gradient: Any, mean: Any, square: Any) -> Callable[[], Any]:
    import torch

    leaf = torch.nn.Parameter(parameter)
    leaf.grad = gradient
    optimizer = torch.optim.AdamW([leaf], lr=1e-6, weight_decay=0.01, fused=True)
    optimizer.step()
    optimizer.state[leaf].update(exp_avg=mean, exp_avg_sq=square)
    step: Callable[[], Any] = optimizer.step
    return step


def _interleaved(variants: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of each call; short calls are repeated within one measurement, so that the clock can see them."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    started = time.perf_counter()
    for call in variants.values():
        call()
    once = max((time.perf_counter() - started) / len(variants), 1e-6)
    repeats = max(1, int(2e-4 / once))
    rounds = min(200, max(_ROUNDS, int(_SECONDS / (once * repeats))))
    for _ in range(rounds):
        for name in random.sample(sorted(variants), len(variants)):
            call = variants[name]
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - begun) / repeats)
    return times


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Tenth percentile, median and ninetieth percentile."""
    cuts = statistics.quantiles(seconds, n=10)
    return {"p10": cuts[0], "median": statistics.median(seconds), "p90": cuts[-1]}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as text: medians, and from the tenth to the ninetieth percentile in brackets."""
    yield "  ".join(_HEAD)
    for row in rows:
        times = row["microseconds"]
        shown = ["{median:.1f} ({p10:.1f}-{p90:.1f})".format(**times[tier]) for tier in ("stock", "portable")]
        words = [row["dtype"], f"{row['parameters']:.0e}", str(row["threads"]), *shown]
        words += [
            str(row["portable_over_stock"]),
            str(row.get("torch_over_portable", "-")),
            str(row["bandwidth_fraction"]),
        ]
        yield "  ".join(words)


if __name__ == "__main__":
    main(sys.argv[1])
