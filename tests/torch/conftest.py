"""The portable libraries, built once a session, and the modules that they make."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.torch.building import LEVELS, Libraries, build_libraries
from tests.torch.calls import OPTIMIZER
from tests.torch.opening import open_portable


@pytest.fixture(scope="session")
def libraries() -> Libraries:
    """Path of the library of each op and SIMD level."""
    return build_libraries()


@pytest.fixture(scope="session", params=list(LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    """Each SIMD level that this machine runs."""
    return str(request.param)


@pytest.fixture(scope="session")
def cpu_adam_path(libraries: Libraries) -> Path:
    """The library that tests in other processes open."""
    return libraries["cpu_adam", "x86_64_v3"]


@pytest.fixture(scope="session")
def opened(libraries: Libraries, level: str) -> dict[str, ModuleType]:
    """The module of each op at one level."""
    return {op: open_portable(path) for (op, at), path in libraries.items() if at == level}


@pytest.fixture
def adam(opened: dict[str, ModuleType]) -> Iterator[ModuleType]:
    """cpu_adam with the optimizer 0, destroyed afterwards."""
    module = opened["cpu_adam"]
    module.create_adam(0, *OPTIMIZER)
    yield module
    module.destroy_adam(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
