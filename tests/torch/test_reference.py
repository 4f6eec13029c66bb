from __future__ import annotations

import math
import sys
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.runtime.fakes import host_of

from dsops_prebuilt import NoArtifactError, _load
from dsops_prebuilt._catalogue import CPU_OPTIMIZERS
from dsops_prebuilt.portable._rules import RULES
from dsops_prebuilt.reference import _adam, _advice, module_of
from dsops_prebuilt.reference._float32 import PIECE

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = [(F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)]
NAMES = ["float32", "float16, float32", "float16", "bfloat16, float32", "bfloat16"]
SIZE = 10_007
ADAMW, L2, CORRECTED, LOGGED, QUIET = True, False, True, True, False
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1
dtypes = pytest.mark.parametrize(("kind", "state"), DTYPES, ids=NAMES)


def draw(seed: int, *kinds: Any, size: int = SIZE) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(kind) for kind in kinds]


def f32(value: float) -> float:
    return float(torch.tensor(value, dtype=F32))


def assert_rounded(found: Any, exact: Any, slack: float = 0.0) -> None:
    """``found`` is ``exact``, a float64 result, up to a unit in the last place and a few float32 roundings."""
    unit = torch.finfo(found.dtype).eps * exact.abs() + torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - exact).abs() <= unit + 4e-7 * exact.abs().clamp(min=1) + slack).all()


def adam_in_double(step: int, adamw: bool, decay: float, corrected: bool, tensors: list[Any]) -> tuple[Any, Any, Any]:
    """Params and both averages after a step, in float64 but for the float32 numbers that the sources compute with."""
    params, grads, exp_avg, exp_avg_sq = (tensor.double() for tensor in tensors)
    beta1, beta2 = map(f32, BETAS)
    correction1, correction2 = (f32(1 - f32(beta**step)) if corrected else 1.0 for beta in (beta1, beta2))
    grads = grads if adamw else grads + decay * params
    exp_avg = beta1 * exp_avg + (1 - beta1) * grads
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grads**2
    params = params * (1 - LR * decay) if adamw else params
    return params - LR / correction1 * exp_avg / (exp_avg_sq.sqrt() / math.sqrt(correction2) + EPS), exp_avg, exp_avg_sq


@dtypes
@pytest.mark.parametrize(("adamw", "decay", "corrected"), [*product([True, False], [0.0, DECAY], [True, False])])
def test_a_step_of_adam_is_the_formula_rounded_once(
    kind: Any, state: Any, adamw: bool, decay: float, corrected: bool
) -> None:
    module, (params, exp_avg, exp_avg_sq) = module_of("cpu_adam"), draw(0, kind, state, state)
    exp_avg_sq = exp_avg_sq.abs()
    assert module.create_adam(1, LR, *BETAS, EPS, decay, adamw, QUIET) == 0
    for step in (1, 2, 3, 3, 9):
        (grads,) = draw(step, kind)
        exact = adam_in_double(step, adamw, decay, corrected, [params, grads, exp_avg, exp_avg_sq])
        kept = grads.clone()
        numbers = (1, step, LR, *BETAS, EPS, decay, corrected)
        assert module.adam_update(*numbers, params, grads, exp_avg, exp_avg_sq) == 0
        for found, expected in zip((params, exp_avg, exp_avg_sq), exact, strict=True):
            assert_rounded(found, expected, slack=LR * 1e-5)
        assert torch.equal(grads, kept)


@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "Adam"])
def test_sixty_steps_follow_torch_optim(adamw: bool) -> None:
    module, (params, zero, zero_sq) = module_of("cpu_adam"), draw(0, F32, F32, F32)
    zero.zero_(), zero_sq.zero_()
    mine = torch.nn.Parameter(params.clone())
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    theirs = kind([mine], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    module.create_adam(2, LR, *BETAS, EPS, DECAY, adamw, QUIET)
    for step in range(1, 61):
        (mine.grad,) = draw(step, F32)
        module.adam_update(2, step, LR, *BETAS, EPS, DECAY, CORRECTED, params, mine.grad, zero, zero_sq)
        theirs.step()
    assert (params - mine).abs().max() < 2e-5


@pytest.mark.parametrize(("adamw", "decay"), [*product([True, False], [0.0, DECAY])])
def test_the_fused_kernel_and_the_plain_steps_agree(adamw: bool, decay: float) -> None:
    numbers = _adam._Numbers(LR, f32(BETAS[0]), f32(BETAS[1]), EPS, decay, 0.3, 2.0, adamw)  # noqa: SLF001
    tensors = draw(0, F32, F32, F32, F32)
    tensors[3].abs_()
    others = [tensor.clone() for tensor in tensors]
    fused = _adam._fused(numbers)  # noqa: SLF001
    if fused is None:
        pytest.skip("this torch has no fused Adam")
    fused(*tensors)
    _adam._plain(numbers)(*others)  # noqa: SLF001
    for one, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("step", "beta", "lr"), [(0, 0.9, LR), (1, 1.0, LR), (3, 0.9, 1e300), (2, 1.5, LR), (2**63, 0.9, LR)]
)
def test_numbers_out_of_the_ordinary_do_not_raise(step: int, beta: float, lr: float) -> None:
    module = module_of("cpu_adam")
    module.create_adam(3, lr, beta, beta, EPS, DECAY, ADAMW, QUIET)
    assert module.adam_update(3, step, lr, beta, beta, EPS, DECAY, CORRECTED, *draw(0, F32, F32, F32, F32)) == 0


def test_a_negative_weight_decay_does_not_count() -> None:
    module, tensors = module_of("cpu_adam"), draw(0, F32, F32, F32, F32)
    tensors[3].abs_()
    others = [tensor.clone() for tensor in tensors]
    for decay, group in ((-1.0, tensors), (0.0, others)):
        module.create_adam(4, LR, *BETAS, EPS, decay, ADAMW, QUIET)
        module.adam_update(4, 1, LR, *BETAS, EPS, decay, CORRECTED, *group)
    assert all(map(torch.equal, tensors, others))


def test_a_rollback_takes_a_step_back() -> None:
    module, tensors = module_of("cpu_adam"), draw(0, F32, F32, F32, F32)
    tensors[3].abs_()
    before = [tensor.clone() for tensor in tensors]
    module.create_adam(5, LR, *BETAS, EPS, DECAY, ADAMW, QUIET)
    module.adam_update(5, 7, LR, *BETAS, EPS, DECAY, CORRECTED, *tensors)
    assert not torch.equal(tensors[0], before[0])
    assert module.adam_rollback(5, 7, LR, *BETAS, EPS, DECAY, CORRECTED, *tensors) == 0
    for found, expected in zip(tensors, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    tensors[0][0] = math.nan
    module.adam_rollback(5, 7, LR, *BETAS, EPS, DECAY, CORRECTED, *tensors)
    assert tensors[0][0] == 0


def test_a_rollback_of_other_dtypes_is_refused_in_the_sources_words(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = (5, 7, LR, *BETAS, EPS, DECAY, CORRECTED)
    assert module_of("cpu_adam").adam_rollback(*numbers, *draw(0, F16, F16, F16, F16)) == -1
    assert capsys.readouterr().out == "Error: Adam rollback currently only supports float32 tensors\n"


@dtypes
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_a_step_of_adagrad_is_the_formula_and_leaves_the_update_in_the_gradients(
    kind: Any, state: Any, decay: float
) -> None:
    module, (params, grads, total) = module_of("cpu_adagrad"), draw(0, kind, kind, state)
    total.abs_()
    gradient = grads.double() + decay * params.double()
    exact = total.double() + gradient**2
    update = -LR * gradient / (exact.sqrt() + EPS)
    expected = params.double() + update
    assert module.create_adagrad(1, LR, EPS, decay, QUIET) == 0
    assert module.adagrad_update(1, 1, LR, EPS, decay, params, grads, total) == 0
    for found, value in ((params, expected), (total, exact), (grads, update)):
        assert_rounded(found, value)


def test_twenty_steps_of_adagrad_follow_torch_optim() -> None:
    module, (params, total) = module_of("cpu_adagrad"), draw(0, F32, F32)
    total.zero_()
    mine = torch.nn.Parameter(params.clone())
    theirs = torch.optim.Adagrad([mine], lr=LR, eps=EPS, weight_decay=DECAY)
    module.create_adagrad(1, LR, EPS, DECAY, QUIET)
    for step in range(1, 21):
        (mine.grad,) = draw(step, F32)
        module.adagrad_update(1, step, LR, EPS, DECAY, params, mine.grad.clone(), total)
        theirs.step()
    torch.testing.assert_close(params, mine.data, rtol=1e-6, atol=1e-6)


@dtypes
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_a_step_of_lion_is_the_formula(kind: Any, state: Any, decay: float) -> None:
    module, (params, grads, exp_avg) = module_of("cpu_lion"), draw(0, kind, kind, state)
    grads[0], exp_avg[0] = 0.0, -0.0  # the sign of a zero counts, as in copysignf
    beta1, beta2 = map(f32, BETAS)
    direction = (beta1 * exp_avg.float()).double() + (1 - beta1) * grads.double()
    sign = torch.copysign(torch.ones_like(direction), direction)
    expected = params.double() * (1 - LR * decay) - LR * sign
    average = beta2 * exp_avg.double() + (1 - beta2) * grads.double()
    assert module.create_lion(1, LR, *BETAS, decay, QUIET) == 0
    assert module.lion_update(1, 1, LR, *BETAS, decay, params, grads, exp_avg) == 0
    assert_rounded(params, expected)
    assert_rounded(exp_avg, average)


def test_the_multi_tensor_functions_step_every_parameter() -> None:
    noop = torch.zeros(1, dtype=torch.int32)
    groups = [draw(seed, F32, F32, F32, F32, size=size) for seed, size in ((1, 5), (2, 0), (3, 70))]
    for group in groups:
        group[3].abs_()
    for mode in (0, 1):
        lists = [[group[index].clone() for group in groups] for index in (1, 0, 2, 3)]
        exact = [adam_in_double(2, mode == 1, DECAY, CORRECTED, group) for group in groups]
        module_of("fused_adam").multi_tensor_adam(1, noop, lists, LR, *BETAS, EPS, 2, mode, 1, DECAY)
        for number, values in enumerate(exact):
            assert_rounded(lists[1][number], values[0], slack=LR * 1e-5)
    lists = [[group[index].clone() for group in groups] for index in (1, 0, 2)]
    module_of("fused_lion").multi_tensor_lion(1, noop, lists, LR, *BETAS, 1, 0, DECAY)
    module_of("cpu_lion").create_lion(7, LR, *BETAS, DECAY, QUIET)
    for number, group in enumerate(groups):
        module_of("cpu_lion").lion_update(7, 1, LR, *BETAS, DECAY, group[0], group[1], group[2])
        assert torch.equal(group[0], lists[1][number])


def call(op: str, *tensors: Any, step: Any = 1, optimizer: int = 9) -> Any:
    """One update by an optimizer of ``op`` that exists."""
    name = op.removeprefix("cpu_")
    numbers = {"adam": (LR, *BETAS, EPS, DECAY, CORRECTED), "adagrad": (LR, EPS, DECAY), "lion": (LR, *BETAS, DECAY)}[
        name
    ]
    created = {"adam": (LR, *BETAS, EPS, DECAY, ADAMW, QUIET), "adagrad": (LR, EPS, DECAY, False)}
    module = module_of(op)
    getattr(module, f"create_{name}")(9, *created.get(name, (LR, *BETAS, DECAY, False)))
    return getattr(module, f"{name}_update")(optimizer, step, *numbers, *tensors)


CPU = ["cpu_adam", "cpu_adagrad", "cpu_lion"]
OPTIMIZERS = pytest.mark.parametrize(("op", "count"), [("cpu_adam", 4), ("cpu_adagrad", 3), ("cpu_lion", 3)], ids=CPU)


@OPTIMIZERS
def test_pieces_do_not_show(op: str, count: int) -> None:
    tensors = [tensor.abs() for tensor in draw(0, *[BF16] * count, size=PIECE + 3)]
    others = [tensor[-5:].clone() for tensor in tensors]
    assert call(op, *tensors) == 0
    assert call(op, *others) == 0
    assert all(torch.equal(one[-5:], other) for one, other in zip(tensors, others, strict=True))


@OPTIMIZERS
def test_shapes_views_and_strided_gradients(op: str, count: int) -> None:
    flat = [tensor.abs() for tensor in draw(0, *[F32] * count, size=24)]
    shaped = [tensor.clone().view(4, 6) for tensor in flat]
    shaped[1] = shaped[1].t().contiguous().t()
    assert not shaped[1].is_contiguous()
    call(op, *flat)
    call(op, *shaped)
    assert torch.equal(flat[0], shaped[0].view(-1))
    assert call(op, *draw(0, *[F32] * count, size=0)) == 0


@OPTIMIZERS
def test_autograd_sees_nothing(op: str, count: int) -> None:
    params = torch.nn.Parameter(torch.ones(3))
    assert call(op, params, *[torch.ones(3) for _ in range(count - 1)]) == 0
    assert (params.grad_fn, params._version) == (None, 0)  # noqa: SLF001
    assert not torch.equal(params.data, torch.ones(3))


@OPTIMIZERS
@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        (F64, F64, "Double and state type Double"),
        (F32, F16, "Float and state type Half"),
        (F16, BF16, "Half and state type BFloat16"),
    ],
)
def test_dtypes_without_a_kernel_are_refused_in_the_sources_words(
    op: str, count: int, kind: Any, state: Any, words: str
) -> None:
    name = op.removeprefix("cpu_").capitalize()
    with pytest.raises(RuntimeError) as caught:
        call(op, *draw(0, kind, kind, *[state] * (count - 2)))
    assert str(caught.value) == f"{name} optimizer with param type {words} is not supported on current hardware"


@OPTIMIZERS
def test_what_is_wrong_is_refused_as_by_the_portable_tier(op: str, count: int) -> None:
    good, where = draw(0, *[F32] * count), f"{op.removeprefix('cpu_')}_update"
    strided = [torch.ones(4, 4).t(), *draw(0, *[F32] * (count - 1), size=16)]
    for tensors, kind, message in (
        (good[:-1], TypeError, "arguments"),
        ([good[0], good[1][:5], *good[2:]], ValueError, f"{where}: grads has 5 elements, and params has {SIZE}"),
        ([good[0], good[1].half(), *good[2:]], TypeError, f"{where}: grads is torch.float16, and params is torch.float32"),
        ([good[0].to("meta"), *good[1:]], ValueError, f"{where}: params is on meta, and this is the CPU's kernel"),
        ([None, *good[1:]], TypeError, f"{where}: params is NoneType, not a Tensor"),
        (strided, ValueError, f"{where}: params is not contiguous; the kernel would update a copy, and it would never train"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            call(op, *tensors)
        assert message in str(caught.value)
    with pytest.raises(
        ValueError, match=rf"^{where}: there is no optimizer 8; it was not created, or it was destroyed$"
    ):
        call(op, *good, optimizer=8)
    with pytest.raises(TypeError, match=r"argument 2: "):
        call(op, *good, step=-1)


@pytest.mark.parametrize(
    ("lists", "mode", "message"),
    [
        (
            [[], [], []],
            1,
            "3 lists of [0, 0, 0] tensors; one list each of grads, params, exp_avg, exp_avg_sq is needed",
        ),
        ([[torch.ones(1)], [], [], []], 1, "4 lists of [1, 0, 0, 0] tensors; one list each of grads, params, exp_avg,"),
        ([[], [], [], []], 2, "mode is 2; 0 is Adam with L2, 1 is AdamW"),
    ],
)
def test_lists_that_do_not_fit_are_refused(lists: Any, mode: int, message: str) -> None:
    with pytest.raises(ValueError, match=r"^multi_tensor_adam: ") as caught:
        module_of("fused_adam").multi_tensor_adam(1, torch.ones(1), lists, LR, *BETAS, EPS, 1, mode, 1, DECAY)
    assert message in str(caught.value)
    with pytest.raises(TypeError, match=r"^multi_tensor_adam: an argument is NoneType, not a Tensor$"):
        module_of("fused_adam").multi_tensor_adam(1, None, [[]] * 4, LR, *BETAS, EPS, 1, 1, 1, DECAY)


def test_an_optimizer_is_gone_once_and_may_be_destroyed_twice() -> None:
    for op in CPU:
        name = op.removeprefix("cpu_")
        call(op, *draw(0, *[F32] * (4 if name == "adam" else 3)))
        destroy = getattr(module_of(op), f"destroy_{name}")
        assert (destroy(9), destroy(9)) == (0, 0)
        with pytest.raises(TypeError):
            destroy()


def test_creation_is_logged_as_the_sources_log_it(capsys: pytest.CaptureFixture[str]) -> None:
    module_of("cpu_adam").create_adam(6, 1e-3, 0.9, 0.999, 1e-8, 0.01, L2, LOGGED)
    module_of("cpu_adagrad").create_adagrad(6, 1e-3, 1e-8, 0.01, LOGGED)
    module_of("cpu_lion").create_lion(6, 1e-3, 0.9, 0.99, 0.01, LOGGED)
    assert capsys.readouterr().out.splitlines() == [
        "Adam Optimizer #6 is created with torch arithmetic capability.",
        "Config: alpha=0.001000, betas=(0.900000, 0.999000), weight_decay=0.010000, adam_w=0",
        "Adagrad Optimizer #6 is created with torch arithmetic capability.",
        "Config: alpha=0.001000, weight_decay=0.010000",
        "Lion Optimizer #6 is created with torch arithmetic capability.",
        "Config: alpha=0.001000, betas=(0.900000, 0.990000), weight_decay=0.010000",
    ]


def test_the_surface_is_the_stock_modules() -> None:
    made = {op: {name for name, value in vars(module_of(op)).items() if callable(value)} for op in CPU_OPTIMIZERS}
    rules = set(RULES)
    assert {name for names in made.values() for name in names} >= rules
    assert made["cpu_lion"] == {"create_lion", "lion_update", "destroy_lion"}
    assert {name for name in made["cpu_adam"] if not name.startswith("zenflow_")} == {
        "create_adam",
        "adam_update",
        "adam_rollback",
        "destroy_adam",
    }
    assert module_of("cpu_adam") is module_of("cpu_adam")
    assert module_of("cpu_adam").__file__ is not None


@pytest.mark.parametrize("setting", ["DSOPS_ON_MISS", "DSOPS_TIER"])
def test_load_gives_the_reference_where_a_setting_asks_for_it(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [])
    host = host_of(settings={setting: "reference"}, deepspeed=f"0.19.7 {setting}")
    assert _load.load("cpu_lion", "cuda", host) is module_of("cpu_lion")
    assert "cpu_lion (cuda) is served by the reference tier, plain torch: " in capsys.readouterr().err
    with pytest.raises(NoArtifactError):
        _load.load("fused_lion", "cuda", host)
    with pytest.raises(NoArtifactError):
        _load.load("cpu_lion", "cuda", host_of())


def test_zenflow_is_refused_and_said_so() -> None:
    names = [name for name in vars(module_of("cpu_adam")) if name.startswith("zenflow_")]
    assert len(names) == 9
    for name in names:
        with pytest.raises(NotImplementedError, match=rf"^{name}: the reference tier has no ZenFlow, "):
            getattr(module_of("cpu_adam"), name)(1, 2, 3)


class FakeModule(ModuleType):
    """An op whose step takes so many seconds of a clock that it moves itself."""

    now = 0.0

    def __init__(self, seconds: float) -> None:
        super().__init__("fake")
        self.seconds = seconds
        self.ids: list[int] = []

    def create_adam(self, identity: int, *rest: Any) -> int:
        assert len(rest) == 7
        self.ids.append(identity)
        return 0

    def adam_update(self, identity: int, step: int, *rest: Any) -> int:
        assert (identity in self.ids, step > 0, len(rest), torch.get_num_threads()) == (True, True, 10, 1)
        FakeModule.now += self.seconds
        return 0

    def destroy_adam(self, identity: int) -> int:
        self.ids.remove(identity)
        return 0


def test_two_modules_are_measured_in_turns_and_nothing_stays() -> None:
    threads, one, other = torch.get_num_threads(), FakeModule(0.004), FakeModule(0.001)
    seconds = _advice.measure({"one": one, "other": other}, clock=lambda: FakeModule.now)
    assert seconds == pytest.approx({"one": 0.004, "other": 0.001})
    assert (one.ids, other.ids, torch.get_num_threads()) == ([], [], threads)
    assert FakeModule.now < 0.03


def test_advice_is_given_once_and_never_fails(capsys: pytest.CaptureFixture[str]) -> None:
    slow, broken = FakeModule(0.0), ModuleType("broken")
    for op, module in (("cpu_adam", slow), ("cpu_adam", slow), ("cpu_adam", broken), ("cpu_lion", broken)):
        _advice.advise(op, module)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "dsops-prebuilt: this processor has no SIMD level above x86_64, so cpu_adam is DeepSpeed's scalar kernel; "
    )


def test_the_sentence_names_the_faster_one() -> None:
    fact = "this processor has no SIMD level above x86_64, so cpu_adam is DeepSpeed's scalar kernel"
    test = "with 262144 float32 parameters on one thread"
    assert _advice.sentence(scalar=3.0, fused=1.0) == (
        f"{fact}; torch's fused kernel is 3.0 times as fast {test}. DSOPS_TIER=reference chooses it"
    )
    assert _advice.sentence(scalar=1.0, fused=2.0) == f"{fact}; it is 2.0 times as fast as torch's fused one {test}"


def test_tensors_that_were_made_in_inference_mode_are_updated_outside_it() -> None:
    module = module_of("cpu_adam")
    module.create_adam(0, LR, *BETAS, EPS, DECAY, ADAMW, QUIET)
    with torch.inference_mode():
        tensors = [torch.ones(16) for _ in range(4)]
    assert module.adam_update(0, 1, LR, *BETAS, EPS, DECAY, CORRECTED, *tensors) == 0
    assert tensors[0][0] < 1
    module.destroy_adam(0)
