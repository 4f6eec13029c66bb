from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from tests.unit.runtime.fakes import OPS, SRC, FakeDeepSpeed

import dsops_prebuilt_activate

ATTACHED = """
    from deepspeed.ops.op_builder.builder import OpBuilder
    print("attached" if hasattr(OpBuilder.load, "__wrapped__") else "untouched")
"""


@pytest.fixture
def deepspeed(tmp_path: Path) -> FakeDeepSpeed:
    return FakeDeepSpeed(tmp_path)


def test_the_pth_line_attaches_when_deepspeed_is_imported(deepspeed: FakeDeepSpeed) -> None:
    done = deepspeed.run(ATTACHED)
    assert (done.stdout, done.stderr) == ("attached\n", "")


def test_without_it_deepspeed_is_untouched(deepspeed: FakeDeepSpeed) -> None:
    assert deepspeed.run_bare(ATTACHED).stdout == "untouched\n"


def test_the_three_files_of_activation_name_one_function() -> None:
    line = "import dsops_prebuilt_activate; dsops_prebuilt_activate.install()\n"
    assert (SRC / "dsops_prebuilt_activate.pth").read_text() == line
    assert (SRC / "dsops_prebuilt_activate.start").read_text() == "dsops_prebuilt_activate:install\n"
    assert callable(dsops_prebuilt_activate.install)


@pytest.mark.parametrize(
    ("word", "answer"), [("1", "untouched"), ("yes", "untouched"), ("0", "attached"), ("", "attached")]
)
def test_dsops_disable(deepspeed: FakeDeepSpeed, word: str, answer: str) -> None:
    assert deepspeed.run(ATTACHED, DSOPS_DISABLE=word).stdout == f"{answer}\n"


def test_dsops_disable_set_after_activation(deepspeed: FakeDeepSpeed) -> None:
    script = "import os; os.environ['DSOPS_DISABLE'] = '1'\n"
    assert deepspeed.run(script + dedent(ATTACHED)).stdout == "untouched\n"


def test_activation_twice_is_once(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import sys, dsops_prebuilt, dsops_prebuilt_activate
        dsops_prebuilt.activate()
        dsops_prebuilt_activate.install()
        print(sum(hasattr(finder, "dsops_prebuilt") for finder in sys.meta_path))
        from deepspeed.ops.op_builder.builder import OpBuilder
        print(hasattr(OpBuilder.load.__wrapped__, "__wrapped__"))
    """
    assert deepspeed.run(script).stdout == "1\nFalse\n"


def test_attaching_twice_is_once(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import sys, dsops_prebuilt
        from deepspeed.ops.op_builder.builder import OpBuilder
        sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "dsops_prebuilt")]
        dsops_prebuilt.activate()
        print(hasattr(OpBuilder.load, "__wrapped__"), hasattr(OpBuilder.load.__wrapped__, "__wrapped__"))
    """
    assert deepspeed.run(script).stdout == "True False\n"


def test_late_activation_reaches_the_classes_that_exist(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    script = """
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        from deepspeed.ops.op_builder.spatial_inference import SpatialInferenceBuilder
        import dsops_prebuilt
        dsops_prebuilt.activate()
        print(CPUAdamBuilder().is_compatible(), SpatialInferenceBuilder().is_compatible())
        print(CPUAdamBuilder().load().__name__.rpartition(".")[0])
    """
    done = deepspeed.run_bare(script)
    assert (done.stdout, done.stderr) == ("True False\ndeepspeed.ops.adam\n", "")


def test_the_loader_keeps_its_class_and_its_source(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import importlib, inspect
        import deepspeed.ops.op_builder.builder as builder
        print(type(builder.__loader__).__name__, "exec_module" in vars(builder.__loader__))
        print(inspect.getsource(builder.OpBuilder).splitlines()[0], builder.__spec__.origin == builder.__file__)
        importlib.reload(builder)
        print(hasattr(builder.OpBuilder.load, "__wrapped__"))
    """
    assert deepspeed.run(script).stdout == "SourceFileLoader False\nclass OpBuilder: True\nTrue\n"


def test_a_deepspeed_in_a_zip_file(tmp_path: Path) -> None:
    deepspeed = FakeDeepSpeed(tmp_path / "site")
    archive = tmp_path / "deepspeed.zip"
    with zipfile.ZipFile(archive, "w") as files:
        for name, text in OPS.items():
            files.writestr(name, dedent(text))
    script = f"import sys; sys.path.insert(0, {str(archive)!r})\n" + dedent(ATTACHED)
    script += "import deepspeed.ops.op_builder.cpu as cpu; print(type(cpu.__loader__).__name__)\n"
    done = deepspeed.run(script)
    # CPython 3.9's zipimporter has no exec_module, and is left alone.
    expected = "attached" if sys.version_info >= (3, 10) else "untouched"
    assert (done.stdout, done.stderr) == (f"{expected}\nzipimporter\n", "")


class Shared:
    """A loader that runs several modules, as a zipimporter does."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def exec_module(self, module: ModuleType) -> None:
        self.ran.append(module.__name__)


def test_a_shared_loader_is_extended_for_its_own_module_only(capsys: pytest.CaptureFixture[str]) -> None:
    loader = Shared()
    dsops_prebuilt_activate._extend(loader, "op_builder.builder")  # noqa: SLF001
    dsops_prebuilt_activate._extend(loader, "op_builder.builder")  # noqa: SLF001
    loader.exec_module(ModuleType("op_builder.other"))
    assert capsys.readouterr().err == ""
    loader.exec_module(ModuleType("op_builder.builder"))
    assert "not attached to DeepSpeed (KeyError: 'OpBuilder')" in capsys.readouterr().err
    loader.exec_module(ModuleType("op_builder.builder"))
    assert capsys.readouterr().err == ""
    assert loader.ran == ["op_builder.other", "op_builder.builder", "op_builder.builder"]


class Bare:
    """A loader of the old protocol: no ``exec_module``."""


class Slotted:
    __slots__ = ()

    def exec_module(self, module: object) -> None:
        raise AssertionError(module)


@pytest.mark.parametrize("loader", [Bare(), Slotted(), None], ids=["bare", "slots", "none"])
def test_a_loader_that_cannot_be_extended_is_left_alone(loader: object) -> None:
    dsops_prebuilt_activate._extend(loader, "op_builder.builder")  # noqa: SLF001
    assert not getattr(loader, "__dict__", None)


def test_a_module_that_is_not_there_is_not_there(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import importlib.util
        print(importlib.util.find_spec("deepspeed.env_report") is not None)
        try:
            import op_builder.builder
        except ModuleNotFoundError as error:
            print(error)
    """
    assert deepspeed.run(script).stdout == "True\nNo module named 'op_builder'\n"


def test_a_finder_that_raises_raises_as_without_us(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import sys
        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name.endswith("op_builder.builder"):
                    raise OSError("broken finder")
        sys.meta_path.insert(1, Broken())
        try:
            import deepspeed.ops.op_builder.builder
        except OSError as error:
            print(error)
    """
    assert deepspeed.run(script).stdout == "broken finder\n"


def test_an_error_of_the_module_itself_comes_through(deepspeed: FakeDeepSpeed) -> None:
    (deepspeed.entry / "deepspeed/ops/op_builder/builder.py").write_text("raise KeyError('theirs')")
    done = deepspeed.run(ATTACHED)
    assert done.stderr.rstrip().endswith("KeyError: 'theirs'")
    assert "dsops-prebuilt" not in done.stderr


def test_a_fault_of_ours_is_one_line_and_deepspeed_is_imported(deepspeed: FakeDeepSpeed) -> None:
    (deepspeed.entry / "deepspeed/ops/op_builder/builder.py").write_text("class Renamed: pass")
    done = deepspeed.run("import deepspeed.ops.op_builder.builder as module; print(module.Renamed.__name__)")
    assert done.stdout == "Renamed\n"
    assert done.stderr == (
        "dsops-prebuilt: not attached to DeepSpeed (KeyError: 'OpBuilder'); DeepSpeed goes on without prebuilt ops. "
        "Run `dsops list`, reinstall dsops-prebuilt, or set DSOPS_DISABLE=1.\n"
    )


def test_without_the_package_the_hook_says_so_and_raises_nothing(tmp_path: Path) -> None:
    deepspeed = FakeDeepSpeed(tmp_path)
    (tmp_path / "dsops_prebuilt_activate.py").write_bytes((SRC / "dsops_prebuilt_activate.py").read_bytes())
    done = deepspeed.run(ATTACHED, PYTHONPATH=str(tmp_path))
    assert done.stdout == "untouched\n"
    assert done.stderr.startswith(
        "dsops-prebuilt: not attached to DeepSpeed (ModuleNotFoundError: No module named 'dsops_p"
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    "broken", ["sys.meta_path = None", "sys.meta_path = ()", "sys.stderr = None; sys.meta_path = None"]
)
def test_install_never_raises(deepspeed: FakeDeepSpeed, broken: str) -> None:
    script = f"""
        import sys, dsops_prebuilt_activate
        {broken}
        dsops_prebuilt_activate.install()
        sys.stdout.write("alive")
    """
    assert deepspeed.run_bare(script).stdout == "alive"


def test_a_module_that_is_still_running_is_passed_over(deepspeed: FakeDeepSpeed) -> None:
    path = deepspeed.entry / "deepspeed/ops/op_builder/builder.py"
    path.write_text("import dsops_prebuilt_activate; dsops_prebuilt_activate.install()\n" + path.read_text())
    done = deepspeed.run_bare(ATTACHED)
    assert (done.stdout, done.stderr) == ("untouched\n", "")


@pytest.mark.parametrize("way", ["file", "setuptools"])
def test_a_setup_py_run_is_left_alone(deepspeed: FakeDeepSpeed, way: str) -> None:
    """A DeepSpeed checkout: ``op_builder`` on top, imported by its ``setup.py``, whose text setuptools executes."""
    folder = deepspeed.entry / "op_builder"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .builder import OpBuilder\n")
    (folder / "builder.py").write_text(OPS["deepspeed/ops/op_builder/builder.py"])
    setup = deepspeed.entry / "setup.py"
    setup.write_text("from op_builder import OpBuilder\nprint(hasattr(OpBuilder.load, '__wrapped__'))\n")
    script = {
        "file": f"import runpy; runpy.run_path({str(setup)!r}, run_name='__main__')",
        "setuptools": f"exec(open({str(setup)!r}).read(), {{'__file__': {str(setup)!r}, '__name__': '__main__'}})",
    }[way]
    assert deepspeed.run(script).stdout == "False\n"
    outside = "from op_builder import OpBuilder\nprint(hasattr(OpBuilder.load, '__wrapped__'))\n"
    assert deepspeed.run(outside).stdout == "True\n"


def test_activation_imports_nothing_that_was_not_there(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import sys
        before = set(sys.modules)
        import dsops_prebuilt_activate
        dsops_prebuilt_activate.install()
        print(sorted(set(sys.modules) - before))
    """
    assert deepspeed.run_bare(script).stdout == "['dsops_prebuilt_activate']\n"


def test_activation_costs_well_under_a_millisecond(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import sys, time, dsops_prebuilt_activate
        times = []
        for _ in range(20):
            start = time.perf_counter()
            dsops_prebuilt_activate.install()
            times.append(time.perf_counter() - start)
            sys.meta_path.pop(0)
        print(min(times) < 0.0005)
    """
    assert deepspeed.run_bare(script).stdout == "True\n"


def test_activate_reaches_what_an_import_that_missed_the_finder_left(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import sys, dsops_prebuilt
        finder = sys.meta_path.pop(0)
        from deepspeed.ops.op_builder.builder import OpBuilder
        sys.meta_path.insert(0, finder)
        print(hasattr(OpBuilder.load, "__wrapped__"))
        dsops_prebuilt.activate()
        print(hasattr(OpBuilder.load, "__wrapped__"))
    """
    assert deepspeed.run(script).stdout == "False\nTrue\n"


def test_a_module_that_is_called_setup_is_no_setup_run(deepspeed: FakeDeepSpeed) -> None:
    (deepspeed.entry / "setup.py").write_text(dedent(ATTACHED))
    assert deepspeed.run("import setup").stdout == "attached\n"


@pytest.mark.parametrize("stream", ["None", "open('/dev/full', 'w', buffering=1)"])
def test_a_fault_that_cannot_be_told_breaks_nothing(deepspeed: FakeDeepSpeed, stream: str) -> None:
    (deepspeed.entry / "deepspeed/ops/op_builder/builder.py").write_text("class Renamed: pass")
    script = (
        f"import sys; sys.stderr = {stream}\nimport deepspeed.ops.op_builder.builder as b; print(b.Renamed.__name__)"
    )
    assert deepspeed.run(script).stdout == "Renamed\n"
