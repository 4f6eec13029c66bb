"""What the functions take, what they refuse and how, beside what the stock module does with the same arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.torch import calls
from tests.torch.calls import ALIKE, NUMBERS, OPTIMIZER, Subclass, block, outcome, tensors, update
from tests.torch.opening import run_script
from torch._subclasses.fake_tensor import FakeTensorMode

HEAD = "adam_update(int, int, float, float, float, float, float, bool, Tensor, Tensor, Tensor, Tensor)"


@pytest.mark.parametrize("name", ALIKE)
def test_it_answers_as_the_stock_module_does(adam: ModuleType, name: str) -> None:
    call, expected = ALIKE[name]
    assert outcome(call, adam) == expected


def of_fake() -> Any:
    with FakeTensorMode():
        return torch.empty(16)


def shrunk() -> torch.Tensor:
    tensor = torch.rand(64)[32:48]
    tensor.untyped_storage().resize_(64)
    return tensor


def released(offset: int) -> torch.Tensor:
    tensor = torch.rand(64)[offset : offset + 16]
    tensor.untyped_storage().resize_(0)
    return tensor


def test_a_released_storage_is_seen_at_low_addresses_too(cpu_adam_path: Path) -> None:
    """Where Python is no PIE, tensors may lie below any offset: then each address is compared with its own."""
    script = f"""
import sys
import torch
from pathlib import Path
from dsops_prebuilt.portable import _steps, _tensors
from tests.torch.opening import open_portable

_steps.LOW = _tensors.LOW = 2**62  # every address is a low one now
module = open_portable(Path(sys.argv[1]))
module.create_adam(0, *{OPTIMIZER})
tensors = [torch.ones(16) for _ in range(4)]
assert module.adam_update(*{NUMBERS}, *tensors) == 0 and tensors[0][0] < 1
for place in range(4):
    for offset in (0, 8):
        gone = torch.rand(64)[offset : offset + 16]
        gone.untyped_storage().resize_(0)
        try:
            module.adam_update(*{NUMBERS}, *tensors[:place], gone, *tensors[place + 1 :])
        except ValueError as error:
            print(error)
"""
    done = run_script(script, str(cpu_adam_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was the storage released?") == 8


def test_a_large_tensor_beyond_its_shrunk_storage_is_refused(adam: ModuleType) -> None:
    large = [torch.ones(2**18) for _ in range(4)]
    large[1].untyped_storage().resize_(16)
    with pytest.raises(ValueError, match="adam_update: grads is 1048560 bytes longer than its storage"):
        adam.adam_update(*NUMBERS, *large)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.rand(16), 0.1, 0, torch.qint8)


def of_rows() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(4).to_sparse_csr()


NO_MEMORY = "is 64 bytes longer than its storage; was the storage released?"
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (lambda: None, TypeError, "is NoneType, not a Tensor"),
    "meta": (lambda: torch.empty(16, device="meta"), ValueError, "is on meta, and this is the CPU's kernel"),
    "fake": (of_fake, ValueError, NO_MEMORY),
    "functional": (lambda: torch._to_functional_tensor(torch.rand(16)), ValueError, "has no memory of its own"),  # noqa: SLF001
    "zero": (lambda: torch._efficientzerotensor((16,)), ValueError, "has no memory of its own"),  # noqa: SLF001
    "released": (lambda: released(0), ValueError, NO_MEMORY),
    "released under a view": (
        lambda: released(8),
        ValueError,
        "is 96 bytes longer than its storage; was the storage released?",
    ),
    "sparse": (
        lambda: torch.eye(4).to_sparse(),
        ValueError,
        "has the layout torch.sparse_coo; only a dense tensor has memory to give",
    ),
    "rows": (of_rows, ValueError, "has the layout torch.sparse_csr; only a dense tensor has memory to give"),
    "mkldnn": (
        lambda: torch.rand(16).to_mkldnn(),
        ValueError,
        "has the layout torch._mkldnn; only a dense tensor has memory to give",
    ),
    "quantised": (quantised, TypeError, "is torch.qint8, which no kernel knows"),
    "float8": (
        lambda: torch.zeros(16, dtype=torch.float8_e4m3fn),
        TypeError,
        "is torch.float8_e4m3fn, which no kernel knows",
    ),
    "short": (lambda: torch.rand(15), ValueError, "has 15 elements, and params has 16"),
    "long": (lambda: torch.rand(17), ValueError, "has 17 elements, and params has 16"),
    "another dtype": (lambda: torch.rand(16).half(), TypeError, "is torch.float16, and params is torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_that_no_kernel_can_read_is_refused(adam: ModuleType, name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind) as caught:
        update(adam, at=9, value=make())
    assert type(caught.value) is kind
    assert str(caught.value) == f"adam_update: grads {message}"


def test_a_tensor_whose_storage_shrank_is_refused_where_it_is_looked_at(adam: ModuleType) -> None:
    with pytest.raises(ValueError, match="exp_avg is 128 bytes longer than its storage"):
        update(adam, tensors=[tensors()[0], torch.rand(4, 8)[:, ::2], shrunk(), tensors()[3]])


def test_torch_makes_no_view_beyond_a_storage() -> None:
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 16"):
        torch.rand(4).as_strided((8,), (1,))


@pytest.mark.parametrize("position", [8, 10, 11], ids=["params", "exp_avg", "exp_avg_sq"])
def test_a_tensor_that_is_written_must_be_contiguous(adam: ModuleType, position: int) -> None:
    name = {8: "params", 10: "exp_avg", 11: "exp_avg_sq"}[position]
    with pytest.raises(ValueError, match="contiguous") as caught:
        update(adam, at=position, value=torch.rand(4, 8)[:, ::2])
    expected = f"adam_update: {name} is not contiguous; the kernel would update a copy, and it would never train"
    assert str(caught.value) == expected


def test_a_gradient_that_is_not_contiguous_is_copied(adam: ModuleType) -> None:
    wide = torch.rand(4, 8)
    one, other = tensors((4, 4)), tensors((4, 4))
    adam.adam_update(*NUMBERS, one[0], wide[:, ::2], *one[2:])
    adam.adam_update(*NUMBERS, other[0], wide[:, ::2].contiguous(), *other[2:])
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (1, 3.0, "argument 2: a float is no int"),
        (1, -1, "argument 2: the number is out of range"),
        (2, "x", "argument 3: str is no float"),
        (7, "x", "argument 8: str is no bool"),
    ],
    ids=["float", "range", "text", "flag"],
)
def test_a_number_is_refused_by_its_place(adam: ModuleType, at: int, value: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        update(adam, at=at, value=value)
    assert str(caught.value) == f"{HEAD}: {message}"


@pytest.mark.parametrize(
    ("dtype", "names"),
    [(torch.float64, "Double"), (torch.int32, "Int"), (torch.uint8, "Byte"), (torch.complex64, "ComplexFloat")],
    ids=str,
)
def test_what_has_no_kernel_is_the_sources_own_refusal(adam: ModuleType, dtype: torch.dtype, names: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        update(adam, tensors=tensors(params=dtype) if dtype.is_floating_point else [torch.ones(16, dtype=dtype)] * 4)
    expected = f"Adam optimizer with param type {names} and state type {names} is not supported on current hardware"
    assert str(caught.value) == expected


@pytest.mark.parametrize("known", [False, True], ids=["never created", "destroyed"])
def test_an_optimizer_that_is_not_there_is_refused(adam: ModuleType, known: bool) -> None:
    if known:
        adam.create_adam(5, *OPTIMIZER)
        adam.destroy_adam(5)
    message = "there is no optimizer 5; it was not created, or it was destroyed"
    with pytest.raises(ValueError, match="no optimizer") as caught:
        update(adam, at=0, value=5)
    assert str(caught.value) == f"adam_update: {message}"
    with pytest.raises(ValueError, match="no optimizer") as caught:
        adam.zenflow_adam_create(5, [0])
    assert str(caught.value) == f"zenflow_adam_create: {message}"


def test_a_later_optimizer_of_one_id_replaces_the_earlier(adam: ModuleType) -> None:
    with_decay, without = tensors(), tensors()
    adam.create_adam(5, 1e-3, 0.9, 0.999, 1e-8, 0.5, calls.NUMBERS[7], calls.OPTIMIZER[6])
    adam.create_adam(5, 1e-3, 0.9, 0.999, 1e-8, 0.5, calls.OPTIMIZER[6], calls.OPTIMIZER[6])
    for made in (with_decay, without):
        number = 0 if made is with_decay else 5
        adam.adam_update(number, 1, 1e-3, 0.9, 0.999, 1e-8, 0.5, calls.NUMBERS[7], *made)
    assert not torch.equal(with_decay[0], without[0])
    adam.destroy_adam(5)
    with pytest.raises(ValueError, match="there is no optimizer 5"):
        update(adam, at=0, value=5)


def test_a_parameter_and_a_subclass_are_written(adam: ModuleType) -> None:
    plain = tensors()
    adam.adam_update(*NUMBERS, *plain)
    for wrap in (torch.nn.Parameter, lambda one: one.as_subclass(Subclass)):
        made = tensors()
        adam.adam_update(*NUMBERS, wrap(made[0]), *made[1:])
        assert torch.equal(made[0], plain[0])


def test_functions_are_positional_and_say_what_they_take(opened: dict[str, ModuleType]) -> None:
    functions = {name: value for module in opened.values() for name, value in vars(module).items() if callable(value)}
    assert {name: value.__name__ for name, value in functions.items()} == {name: name for name in functions}
    assert functions["lion_update"].__doc__ == (
        "lion_update(int, int, float, float, float, float, Tensor, Tensor, Tensor): DeepSpeed's function of this name."
    )
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        functions["destroy_lion"](optimizer_id=0)
    with pytest.raises(TypeError) as caught:
        functions["destroy_lion"]()
    assert str(caught.value) == "destroy_lion(int) was called with 0 arguments"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 0, 1, *[[1.0]] * 5, [1]), "zenflow_adam_submit: the control block's address is 0"),
        ((None, 0, 1, *[[1.0]] * 5, [1, 1]), "zenflow_adam_submit: lists of [1, 2] items; one length, at most 1024"),
        (
            (None, 0, 1, *[[1.0] * 1025] * 5, [1] * 1025),
            "zenflow_adam_submit: lists of [1025] items; one length, at most 1024",
        ),
        ((None, 2, 1, *[[1.0]] * 5, [1]), "zenflow_adam_submit: now_state is 2; there are two buffers"),
    ],
    ids=["address", "lengths", "groups", "state"],
)
def test_a_step_that_the_control_block_cannot_hold_is_refused(
    adam: ModuleType, values: tuple[Any, ...], message: str
) -> None:
    memory = block(adam)
    adam.zenflow_adam_ctrl_init(memory.data_ptr(), 1)
    with pytest.raises(ValueError, match="zenflow_adam_submit") as caught:
        adam.zenflow_adam_submit(*(memory.data_ptr() if value is None else value for value in values))
    assert str(caught.value) == message


def fused(module: ModuleType, lists: Any, mode: int = 1) -> None:
    module.multi_tensor_adam(2048, torch.zeros(1, dtype=torch.int32), lists, 1e-3, 0.9, 0.999, 1e-8, 1, mode, 1, 0.01)


def test_lists_of_tensors_are_updated_as_tensors_are(adam: ModuleType, opened: dict[str, ModuleType]) -> None:
    sizes = (1, 16, 100)
    alone, together = ([tensors(size) for size in sizes] for _ in "ab")
    for made in alone:
        adam.adam_update(*NUMBERS, *made)
    params, grads, *states = (list(group) for group in zip(*together, strict=True))
    fused(opened["fused_adam"], [grads, params, *states])
    assert all(torch.equal(*pair) for pair in zip([made[0] for made in alone], params, strict=True))
    fused(opened["fused_adam"], [(), (), (), ()])


@pytest.mark.parametrize(
    ("lists", "mode", "message"),
    [
        (
            [[torch.ones(3)]] * 3,
            1,
            "3 lists of [1, 1, 1] tensors; one list each of grads, params, exp_avg, exp_avg_sq is needed",
        ),
        (
            [[torch.ones(3)]] * 3 + [[]],
            1,
            "4 lists of [1, 1, 1, 0] tensors; one list each of grads, params, exp_avg, exp_avg_sq is needed",
        ),
        ([[torch.ones(3)]] * 3 + [[torch.ones(2)]], 1, "exp_avg_sq has 2 elements, and grads has 3"),
        ([[torch.ones(3)]] * 4, 2, "mode is 2; 0 is Adam with L2, 1 is AdamW"),
    ],
    ids=["lists", "lengths", "sizes", "mode"],
)
def test_lists_that_do_not_fit_are_refused(opened: dict[str, ModuleType], lists: Any, mode: int, message: str) -> None:
    with pytest.raises(ValueError, match="multi_tensor_adam") as caught:
        fused(opened["fused_adam"], lists, mode)
    assert str(caught.value) == f"multi_tensor_adam: {message}"


def test_lion_and_adagrad_learn(opened: dict[str, ModuleType]) -> None:
    lion, adagrad = opened["cpu_lion"], opened["cpu_adagrad"]
    lion.create_lion(0, 1e-2, 0.9, 0.99, 0.0, calls.OPTIMIZER[6])
    adagrad.create_adagrad(0, 1e-2, 1e-8, 0.0, calls.OPTIMIZER[6])
    params, grads, state, _ = tensors(100)
    wanted = params - 1e-2 * torch.sign(0.9 * state + (1 - 0.9) * grads)
    assert lion.lion_update(0, 1, 1e-2, 0.9, 0.99, 0.0, params, grads, state) == 0
    torch.testing.assert_close(params, wanted)
    params, grads, state, _ = tensors(100)
    wanted = params - 1e-2 * grads / ((state + grads * grads).sqrt() + 1e-8)
    assert adagrad.adagrad_update(0, 1, 1e-2, 1e-8, 0.0, params, grads, state) == 0
    torch.testing.assert_close(params, wanted)
    lion.destroy_lion(0)
    adagrad.destroy_adagrad(0)
    with pytest.raises(ValueError, match="lion_update: there is no optimizer 0"):
        lion.lion_update(0, 1, 1e-2, 0.9, 0.99, 0.0, params, grads, state)
    with pytest.raises(ValueError, match="adagrad_update: there is no optimizer 0"):
        adagrad.adagrad_update(0, 1, 1e-2, 1e-8, 0.0, params, grads, state)
