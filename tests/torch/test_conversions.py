"""The 16-bit floats of ops/_portable against torch's, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.torch.building import MARCH, compile_shared

WORDS = {torch.float16: "half", torch.bfloat16: "bfloat16"}
EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16)


@pytest.fixture(scope="module")
def converters(level: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).parent / "conversions.cpp"
    target = tmp_path_factory.mktemp("conversions") / "conversions.so"
    return ctypes.CDLL(str(compile_shared(target, [source], f"-march={MARCH[level]}")))


@pytest.fixture(params=[False, True], ids=["denormals", "flushed"])
def flushed(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With and without torch.set_flush_denormal."""
    assert torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)


def convert(converters: ctypes.CDLL, name: str, source: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    target = torch.empty(source.numel(), dtype=kind)
    count = ctypes.c_long(source.numel())
    converters[name](ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr()), count)
    return target


def sample() -> torch.Tensor:
    """Floats: every one of 16 bits, its neighbours and the ties around it, and many at random, NaNs included."""
    high = EVERY.to(torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0xF000])
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (2_000_000,), generator=generator).to(torch.int32)
    return torch.cat([(high[:, None] | low[None].to(torch.int32)).flatten(), random]).view(torch.float32)


@pytest.mark.parametrize("kind", WORDS, ids=list(WORDS.values()))
def test_every_16_bits_are_the_float_that_torch_has(converters: ctypes.CDLL, kind: torch.dtype, flushed: bool) -> None:
    made = convert(converters, f"{WORDS[kind]}_to_float", EVERY.view(kind), torch.float32)
    torch.set_flush_denormal(False)
    wanted = EVERY.view(kind).to(torch.float32)
    assert flushed in {False, True}
    numbers = ~wanted.isnan()
    assert torch.equal(made.view(torch.int32)[numbers], wanted.view(torch.int32)[numbers])
    assert made[~numbers].isnan().all()


@pytest.mark.parametrize("kind", WORDS, ids=list(WORDS.values()))
def test_floats_are_rounded_as_torch_rounds_them(converters: ctypes.CDLL, kind: torch.dtype, flushed: bool) -> None:
    floats = sample()
    made = convert(converters, f"float_to_{WORDS[kind]}", floats, kind)
    torch.set_flush_denormal(False)
    wanted = floats.to(kind)
    assert flushed in {False, True}
    numbers = ~floats.isnan()
    assert torch.equal(made.view(torch.int16)[numbers], wanted.view(torch.int16)[numbers])


def test_a_nan_is_c10s(converters: ctypes.CDLL, level: str) -> None:
    floats = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FA12345]).to(torch.int32)
    floats = torch.cat([floats, floats | -(2**31)]).view(torch.float32)
    brain = convert(converters, "float_to_bfloat16", floats, torch.bfloat16).view(torch.int16)
    assert set(brain.tolist()) == {0x7FC0}
    half = convert(converters, "float_to_half", floats, torch.float16).view(torch.int16).tolist()
    if level == "x86_64":  # c10 without F16C: one NaN, with the sign
        assert half == [0x7E00] * 4 + [0x7E00 - 2**15] * 4
    else:  # vcvtps2ph: the payload's high bits, made quiet
        assert half == [0x7E00, 0x7E00, 0x7FFF, 0x7F09] + [word - 2**15 for word in (0x7E00, 0x7E00, 0x7FFF, 0x7F09)]
