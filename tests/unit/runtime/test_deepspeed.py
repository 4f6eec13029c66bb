from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from tests.unit.runtime.fakes import CLOSURE, OPS, VERSION, FakeDeepSpeed, real_extension

from dsops_prebuilt._host import detect
from dsops_prebuilt._manifest import FOLDER, SourceDigest

LOAD = """
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
    module = CPUAdamBuilder().load()
    print(module if isinstance(module, str) else module.__file__)
"""
# As on a machine that has what DeepSpeed's own build needs.
EQUIPPED = """
    import dsops_prebuilt._host as _host
    _host.MachineHost.jit_obstacles = lambda self, needs_cuda: ()
"""


@pytest.fixture
def deepspeed(tmp_path: Path) -> FakeDeepSpeed:
    return FakeDeepSpeed(tmp_path)


def test_a_served_op_is_loaded_without_a_probe(deepspeed: FakeDeepSpeed) -> None:
    made = deepspeed.serve()
    done = deepspeed.run(LOAD)
    assert (done.stdout, done.stderr) == (f"{deepspeed.entry / FOLDER / 'cpu' / made.file}\n", "")


def test_the_module_is_deepspeeds_from_then_on(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    script = """
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        first = CPUAdamBuilder().load()
        print(OpBuilder._loaded_ops == {"cpu_adam": first}, CPUAdamBuilder().load(verbose=True) is first)
    """
    assert deepspeed.run(script).stdout == "True True\n"


def test_what_deepspeed_has_loaded_stays(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    script = """
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        OpBuilder._loaded_ops["cpu_adam"] = "theirs"
        print(CPUAdamBuilder().load())
    """
    assert deepspeed.run(script).stdout == "theirs\n"


def test_releases_without_a_memo_are_served(deepspeed: FakeDeepSpeed) -> None:
    """Up to 0.11 OpBuilder has no ``_loaded_ops``."""
    deepspeed.serve()
    path = deepspeed.entry / "deepspeed/ops/op_builder/builder.py"
    text = (
        path.read_text()
        .replace("    _loaded_ops = {}\n", "")
        .replace("if self.name in __class__._loaded_ops:", "if 0:")
    )
    path.write_text(text)
    script = """
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        print(CPUAdamBuilder().load() is CPUAdamBuilder().load(), hasattr(OpBuilder, "_loaded_ops"))
    """
    assert deepspeed.run(script).stdout == "True False\n"


def test_both_copies_of_the_builders_get_one_module(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    for name in ("__init__", "builder", "cpu/__init__", "cpu/all"):
        path = deepspeed.entry / "op_builder" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text((deepspeed.entry / f"deepspeed/ops/op_builder/{name}.py").read_text())
    script = """
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder as First
        from op_builder.cpu import CPUAdamBuilder as Second
        print(First is not Second, First().load() is Second().load())
    """
    assert deepspeed.run(script).stdout == "True True\n"


def test_a_builder_with_a_load_of_its_own_ends_in_ours(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve("pin_memory")
    script = """
        from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
        print(PinMemoryBuilder().load().__file__ is not None, PinMemoryBuilder().is_compatible())
    """
    assert deepspeed.run(script).stdout == "True True\n"


@pytest.mark.parametrize(
    ("accelerators", "accelerator", "module", "answer"),
    [
        (("cuda",), "cuda", "fused_adam", "NoArtifactError"),  # right kernel, torch without CUDA aside: see below
        (("cpu",), "cuda", "cpu", "module"),
        (("cpu",), "cuda", "fused_adam", "NoArtifactError"),
        (("cpu",), "cpu", "fused_adam", "NoArtifactError"),
        (("cuda",), "cuda", "cpu", "NoArtifactError"),
        (("cpu",), "cpu", "cpu", "module"),
    ],
)
def test_one_name_and_two_kernels(
    deepspeed: FakeDeepSpeed, accelerators: tuple[str, ...], accelerator: str, module: str, answer: str
) -> None:
    deepspeed.serve(
        "fused_adam",
        accelerators=accelerators,
        python="cp00" if accelerators == ("cuda",) and module != "cpu" else None,
    )
    script = f"""
        from deepspeed.ops.op_builder.{module} import FusedAdamBuilder
        try:
            print(type(FusedAdamBuilder().load()).__name__)
        except ImportError as error:
            print(type(error).__name__)
    """
    assert deepspeed.run(script, FAKE_ACCELERATOR=accelerator).stdout == f"{answer}\n"


def test_the_cuda_builder_asks_for_cuda(deepspeed: FakeDeepSpeed) -> None:
    script = """
        from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
        FusedAdamBuilder().load()
    """
    assert "NoArtifactError: no prebuilt fused_adam (cuda) can be loaded here" in deepspeed.run(script).stderr


def test_the_cpu_optimizer_serves_a_cuda_run(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    assert deepspeed.run(LOAD, FAKE_ACCELERATOR="cuda").stdout.startswith(str(deepspeed.entry))


def test_a_builder_from_elsewhere_is_not_answered(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    script = """
        from deepspeed.ops.op_builder.builder import OpBuilder
        class CPUAdamBuilder(OpBuilder):
            pass
        print(CPUAdamBuilder("cpu_adam").load())
    """
    assert deepspeed.run(script).stdout == "probe cpu_adam\ncompiled cpu_adam\n"


def test_a_builder_of_another_project_with_a_package_of_that_name_is_not_answered(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    folder = deepspeed.entry / "theirs/op_builder"
    folder.mkdir(parents=True)
    (folder / "cpu_adam.py").write_text(
        "from deepspeed.ops.op_builder.builder import OpBuilder\nclass CPUAdamBuilder(OpBuilder):\n    pass\n"
    )
    script = "from theirs.op_builder.cpu_adam import CPUAdamBuilder; print(CPUAdamBuilder('cpu_adam').load())"
    assert deepspeed.run(script).stdout == "probe cpu_adam\ncompiled cpu_adam\n"


def test_not_implemented_stays_not_implemented(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    script = """
        from deepspeed.ops.op_builder.cpu import NotImplementedBuilder
        builder = NotImplementedBuilder("cpu_adam")
        print(builder.is_compatible())
        builder.load()
    """
    done = deepspeed.run(script)
    assert done.stdout == "probe cpu_adam\nTrue\n"
    assert done.stderr.rstrip().endswith("ValueError: This op had not been implemented on CPU backend.")


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({"FAKE_INSTALLED": "cpu_adam", "FAKE_BUILT_FOR": "cpu"}, "precompiled cpu_adam"),
        ({"FAKE_INSTALLED": "cpu_adam", "FAKE_BUILT_FOR": "cuda"}, "ours"),
        ({"FAKE_INSTALLED": "cpu_adam", "FAKE_BUILT_FOR": "cpu", "FAKE_TORCH_INFO": "2.6"}, "ours"),
        ({"FAKE_INSTALLED": "cpu_lion", "FAKE_BUILT_FOR": "cpu"}, "ours"),
    ],
    ids=["accepted", "other accelerator", "other torch", "other op"],
)
def test_what_deepspeed_precompiled_and_would_accept_goes_first(
    deepspeed: FakeDeepSpeed, environment: dict[str, str], answer: str
) -> None:
    deepspeed.serve()
    assert (deepspeed.run(LOAD, **environment).stdout == f"{answer}\n") is (answer != "ours")


def test_a_precompiled_op_keeps_its_own_probe_without_a_compiler(deepspeed: FakeDeepSpeed) -> None:
    script = """
        import deepspeed.git_version_info
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        print(CPUAdamBuilder().is_compatible())
    """
    done = deepspeed.run(script, FAKE_INSTALLED="cpu_adam", FAKE_BUILT_FOR="cpu")
    assert done.stdout == "probe cpu_adam\nTrue\n"


PROBES = """
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
    from deepspeed.ops.op_builder.spatial_inference import SpatialInferenceBuilder
    spatial = SpatialInferenceBuilder()
    print(CPUAdamBuilder().is_compatible(verbose=True), spatial.is_compatible(True), spatial.error_log)
"""


def test_probes_of_a_served_op_ask_and_hash_nothing(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve(sources=(SourceDigest("0" * 64, CLOSURE, ("0.1",)),))
    script = """
        import dsops_prebuilt._host as host
        host.MachineHost.gpus = host.MachineHost.closure_digest = None
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        print(CPUAdamBuilder().is_compatible())
    """
    assert deepspeed.run(script).stdout == "True\n"


def test_without_a_compiler_what_is_not_served_is_not_compatible(deepspeed: FakeDeepSpeed) -> None:
    done = deepspeed.run(PROBES)
    assert (done.stdout, done.stderr) == ("False False None\n", "")


def test_with_a_compiler_deepspeed_answers_and_no_probe_raises(deepspeed: FakeDeepSpeed) -> None:
    done = deepspeed.run(EQUIPPED + PROBES)
    assert (done.stdout, done.stderr) == ("probe cpu_adam\nTrue False CUDA_HOME does not exist\n", "")


def test_a_bad_word_in_the_environment_is_no_exception_in_a_probe(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    done = deepspeed.run(PROBES, DSOPS_SIMD="avx2")
    assert (done.stdout[:6], done.stderr) == ("False ", "")


def test_a_class_made_later_is_wrapped_too(deepspeed: FakeDeepSpeed) -> None:
    (deepspeed.entry / "deepspeed/ops/op_builder/late.py").write_text(
        "from .builder import OpBuilder\nclass LateBuilder(OpBuilder):\n    def is_compatible(self, verbose=False):\n        1 / 0\n"
    )
    script = "from deepspeed.ops.op_builder.late import LateBuilder; print(LateBuilder('late').is_compatible())"
    assert deepspeed.run(script).stdout == "False\n"


def test_a_miss_without_a_compiler_is_the_answer_on_one_screen(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve(python="cp00")
    done = deepspeed.run(LOAD)
    text = done.stderr[done.stderr.index("dsops_prebuilt._errors.NoArtifactError: ") :]
    name, _ = real_extension()
    lines = text.splitlines()
    assert lines[0].startswith(
        f"dsops_prebuilt._errors.NoArtifactError: no prebuilt cpu_adam (cpu) can be loaded here: nearest is "
        f"cpu/{name}_op.so, but it is built for cp00, and this interpreter is cp3"
    )
    assert ". Run: pip install" in lines[0] or ". No payload of this release fits" in lines[0]
    assert "Asked for: cpu_adam (cpu)" in lines
    assert "This machine:" in lines
    assert "Artifacts of cpu_adam that are installed (1):" in lines
    assert any(
        line.startswith("DeepSpeed cannot compile it here either; this machine lacks a C++ compiler") for line in lines
    )
    assert lines[-1] == "  dsops explain cpu_adam --accelerator cpu"
    assert len(lines) <= 24
    assert "probe" not in done.stdout


def test_a_miss_with_a_compiler_is_one_line_for_each_op_and_then_deepspeed(deepspeed: FakeDeepSpeed) -> None:
    done = deepspeed.run(
        EQUIPPED + LOAD + "    OpBuilder = CPUAdamBuilder.__mro__[2]; OpBuilder._loaded_ops.clear()" + LOAD,
        DSOPS_TIER="stock",
    )
    assert done.stdout == "probe cpu_adam\ncompiled cpu_adam\n" * 2
    installs = f'Run: pip install "dsops-prebuilt[cu118]=={VERSION}"'
    lists = (
        "No payload of this release fits; payloads with cpu_adam: cpu (torch 2.13, CPython 3.11), "
        "cu118 (torch 2.7, CPython 3.11)"
    )
    assert done.stderr == (
        "dsops-prebuilt: no prebuilt cpu_adam (cpu) can be loaded here: no payload is installed. "
        f"{installs if detect().python == 'cp311' else lists}; DeepSpeed compiles it now\n"
    )


def test_after_a_miss_deepspeeds_own_probe_counts(deepspeed: FakeDeepSpeed) -> None:
    """An artifact of other sources passes the cheap keys; its True must not hide DeepSpeed's probe before a build."""
    deepspeed.serve(sources=(SourceDigest("0" * 64, CLOSURE, ("0.19.7",)),))
    done = deepspeed.run(EQUIPPED + LOAD)
    assert done.stdout == "probe cpu_adam\ncompiled cpu_adam\n"
    assert "but it is made from the sources of DeepSpeed 0.19.7, and the installed ones (0.19.8) differ" in done.stderr


@pytest.mark.parametrize(
    ("word", "equipped", "stdout", "stderr"),
    [
        ("jit", False, "probe cpu_adam\ncompiled cpu_adam\n", "DeepSpeed compiles it now"),
        ("error", True, "", "NoArtifactError: no prebuilt cpu_adam (cpu)"),
        ("jti", True, "", "UsageError: DSOPS_ON_MISS=jti: did you mean jit? accepted: auto, jit, error, reference\n"),
        ("auto", False, "", "NoArtifactError: no prebuilt cpu_adam (cpu)"),
    ],
)
def test_on_miss(deepspeed: FakeDeepSpeed, word: str, equipped: bool, stdout: str, stderr: str) -> None:
    done = deepspeed.run((EQUIPPED if equipped else "") + LOAD, DSOPS_ON_MISS=word)
    assert done.stdout == stdout
    assert stderr in done.stderr


def test_on_miss_error_makes_an_unserved_op_incompatible(deepspeed: FakeDeepSpeed) -> None:
    assert deepspeed.run(EQUIPPED + PROBES, DSOPS_ON_MISS="error").stdout == "False False None\n"


def test_a_served_op_needs_no_word_but_a_wrong_one_is_told(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    assert "UsageError: DSOPS_ON_MISS=never" in deepspeed.run(LOAD, DSOPS_ON_MISS="never").stderr
    assert deepspeed.run(LOAD, DSOPS_ON_MISS="error").stdout.startswith(str(deepspeed.entry))


# The stub of torch has no tensors to compute with.
MODULES = """
    import sys
    import dsops_prebuilt.reference as _reference
    _reference.module_of = lambda op: sys.modules.setdefault("reference of " + op, type(sys)("reference"))
"""
REFERENCE = """
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder
    for builder in (CPUAdamBuilder(), CPUAdamBuilder(), FusedAdamBuilder()):
        print(builder.is_compatible(), builder.load().__name__)
"""
COST = "a step takes up to several times as long as with the compiled op, depending on the dtype"


@pytest.mark.parametrize("setting", ["DSOPS_ON_MISS", "DSOPS_TIER"])
def test_the_reference_is_served_where_a_setting_asks_for_it(deepspeed: FakeDeepSpeed, setting: str) -> None:
    deepspeed.serve(python="cp00" if setting == "DSOPS_ON_MISS" else None)
    done = deepspeed.run(MODULES + REFERENCE, **{setting: "reference"})
    assert done.stdout == "True reference\n" * 3
    assert done.stderr.splitlines() == [
        f"dsops-prebuilt: {op} (cpu) is served by the reference tier, plain torch: {COST}; its arithmetic is DeepSpeed "
        f"0.19.8's. `dsops explain {op} --accelerator cpu` says why"
        for op in ("cpu_adam", "fused_adam")
    ]


def test_the_reference_says_where_its_arithmetic_is_not_that_of_the_installed_release(
    deepspeed: FakeDeepSpeed,
) -> None:
    (deepspeed.entry / "deepspeed/__init__.py").write_text("__version__ = '0.19.5'\n")
    script = "from deepspeed.ops.op_builder.cpu import FusedAdamBuilder; FusedAdamBuilder().load()"
    done = deepspeed.run(MODULES + "    " + script, DSOPS_ON_MISS="reference")
    assert (
        "its arithmetic is DeepSpeed 0.19.8's, and DeepSpeed 0.19.5 is installed: "
        "before 0.19.6 the compiled kernel takes L2 mode for AdamW. `dsops explain" in done.stderr
    )


def test_what_fits_goes_before_the_reference(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    done = deepspeed.run(LOAD, DSOPS_ON_MISS="reference")
    assert (done.stdout.startswith(str(deepspeed.entry)), done.stderr) == (True, "")


@pytest.mark.parametrize(("equipped", "stdout"), [(True, "probe fused_adam\ncompiled fused_adam\n"), (False, "")])
def test_an_op_without_a_reference_is_answered_as_by_default(
    deepspeed: FakeDeepSpeed, equipped: bool, stdout: str
) -> None:
    script = """
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
    print(FusedAdamBuilder().load())
"""
    done = deepspeed.run((EQUIPPED if equipped else "") + script, DSOPS_ON_MISS="reference")
    assert done.stdout == stdout
    assert ("; DeepSpeed compiles it now\n" in done.stderr) is equipped


def test_a_tier_that_has_nothing_is_a_miss(deepspeed: FakeDeepSpeed) -> None:
    made = deepspeed.serve()
    done = deepspeed.run(LOAD, DSOPS_TIER="portable", DSOPS_ON_MISS="reference")
    assert (
        f"nearest is cpu/{made.file}, but its tier is stock, and DSOPS_TIER=portable is in force. Unset DSOPS_TIER\n"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("setting", "answer"), [("DSOPS_ON_MISS", "IntegrityError"), ("DSOPS_TIER", "is served by the reference tier")]
)
def test_a_damaged_payload_is_not_replaced_by_the_reference_unless_its_tier_is_asked_for(
    deepspeed: FakeDeepSpeed, setting: str, answer: str
) -> None:
    deepspeed.serve()
    path = deepspeed.entry / FOLDER / "cpu/manifest.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert answer in deepspeed.run(MODULES + REFERENCE, **{setting: "reference"}).stderr


ADVICE = """
    import dsops_prebuilt._load as _load
    import dsops_prebuilt._host as _host
    import dsops_prebuilt.reference._advice as _advice
    from dsops_prebuilt import Simd
    _load._tier = lambda name: _load.StockTier()
    _advice.advise = lambda op, module: print("advice on", op)
    _host.MachineHost.processor = Simd.{level}
"""


@pytest.mark.parametrize(
    ("tier", "level", "advice"),
    [("portable", "X86_64", "advice on cpu_adam\n"), ("portable", "X86_64_V3", ""), ("stock", "X86_64", "")],
)
def test_a_scalar_portable_kernel_is_measured_where_the_processor_has_no_more(
    deepspeed: FakeDeepSpeed, tier: str, level: str, advice: str
) -> None:
    made = deepspeed.serve(tier=tier)
    done = deepspeed.run(ADVICE.format(level=level) + LOAD)
    assert done.stdout == f"{advice}{deepspeed.entry / FOLDER / 'cpu' / made.file}\n"


def test_a_forced_simd_level_is_told_once(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    done = deepspeed.run(LOAD + LOAD, DSOPS_SIMD="x86_64")
    assert done.stderr == "dsops-prebuilt: DSOPS_SIMD=x86_64 is in force; other ranks must use the same level\n"


def test_a_corrupt_artifact_is_never_replaced_by_a_build(deepspeed: FakeDeepSpeed) -> None:
    made = deepspeed.serve()
    (deepspeed.entry / FOLDER / "cpu" / made.file).write_bytes(b"abc")
    done = deepspeed.run(EQUIPPED + LOAD, DSOPS_ON_MISS="jit")
    assert done.stdout == ""
    assert "IntegrityError" in done.stderr


def test_a_corrupt_manifest_is_never_replaced_by_a_build(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    path = deepspeed.entry / FOLDER / "cpu/manifest.json"
    path.write_bytes(path.read_bytes() + b" ")
    done = deepspeed.run(EQUIPPED + LOAD)
    assert done.stdout == ""
    assert f"IntegrityError: {path}: its sha256 is " in done.stderr


OPTIMIZER = """
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    try:
        DeepSpeedCPUAdam()
    except Exception as error:
        print(type(error).__name__)
    else:
        print("made")
"""


def test_the_cause_is_not_followed_by_the_attribute_error_of_del(deepspeed: FakeDeepSpeed) -> None:
    done = deepspeed.run(OPTIMIZER + OPTIMIZER)
    assert (done.stdout, done.stderr) == ("NoArtifactError\n" * 2, "")


def test_nor_where_deepspeeds_own_build_fails(deepspeed: FakeDeepSpeed) -> None:
    path = deepspeed.entry / "deepspeed/ops/op_builder/builder.py"
    path.write_text(
        path.read_text().replace('return "compiled " + self.name', 'raise RuntimeError("Error building extension")')
    )
    done = deepspeed.run(OPTIMIZER, DSOPS_ON_MISS="jit")
    assert done.stdout == "probe cpu_adam\nRuntimeError\n"
    assert "ds_opt_adam" not in done.stderr


def test_without_us_it_would_be(deepspeed: FakeDeepSpeed) -> None:
    path = deepspeed.entry / "deepspeed/ops/op_builder/builder.py"
    path.write_text(
        path.read_text().replace('return "compiled " + self.name', 'raise RuntimeError("Error building extension")')
    )
    assert "has no attribute 'ds_opt_adam'" in deepspeed.run_bare(OPTIMIZER).stderr


def test_del_of_a_finished_object_still_runs(deepspeed: FakeDeepSpeed) -> None:
    script = (
        OPTIMIZER
        + """
    DeepSpeedCPUAdam.__init__ = lambda self: setattr(self, "ds_opt_adam", self)
    DeepSpeedCPUAdam.destroy_adam = lambda self, number: print("destroyed", number)
    made = DeepSpeedCPUAdam()
    made.__del__()
    """
    )
    assert deepspeed.run(script).stdout.startswith("NoArtifactError\ndestroyed 0\n")


def test_a_subclass_of_the_users_is_spared_too(deepspeed: FakeDeepSpeed) -> None:
    script = """
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        class Mine(DeepSpeedCPUAdam):
            def __init__(self):
                super().__init__()
        try:
            Mine()
        except ImportError as error:
            print(type(error).__name__)
    """
    done = deepspeed.run(script)
    assert (done.stdout, done.stderr) == ("NoArtifactError\n", "")


REPORT = """
    import deepspeed.env_report as report
    from deepspeed import git_version_info
    print(sorted(name for name, on in report.installed_ops.items() if on), report.accelerator_name or "-")
    print(sorted(git_version_info.installed_ops))
"""


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({}, "['cpu_adam'] cpu\n[]\n"),
        ({"FAKE_INSTALLED": "x", "FAKE_BUILT_FOR": "cpu"}, "['cpu_adam', 'x'] cpu\n['x']\n"),
        ({"FAKE_INSTALLED": "x", "FAKE_BUILT_FOR": "cuda"}, "['cpu_adam'] cpu\n['x']\n"),
    ],
    ids=["none", "same accelerator", "other accelerator"],
)
def test_ds_report_shows_a_served_op_as_installed(
    deepspeed: FakeDeepSpeed, environment: dict[str, str], answer: str
) -> None:
    deepspeed.serve()
    done = deepspeed.run(REPORT, **environment)
    assert (done.stdout, done.stderr) == (answer, "")


def test_ds_report_shows_what_the_reference_would_serve(deepspeed: FakeDeepSpeed) -> None:
    assert deepspeed.run(REPORT, DSOPS_ON_MISS="reference").stdout == "['cpu_adam', 'fused_adam'] cpu\n[]\n"


def test_ds_report_shows_no_op_that_would_not_be_loaded(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve(sources=(SourceDigest("0" * 64, CLOSURE, ("0.19.7",)),))
    assert deepspeed.run(REPORT).stdout == "[] -\n[]\n"


def test_ds_report_of_releases_without_accelerator_name(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    for name in ("git_version_info", "env_report"):
        path = deepspeed.entry / f"deepspeed/{name}.py"
        path.write_text(
            path.read_text()
            .replace("import installed_ops, accelerator_name", "import installed_ops")
            .replace("accelerator_name = ", "built_for = ")
        )
    script = REPORT.replace('report.accelerator_name or "-"', 'hasattr(report, "accelerator_name")')
    assert deepspeed.run(script).stdout == "['cpu_adam'] False\n[]\n"


def test_the_fake_has_the_names_of_the_real_one() -> None:
    """The names that the seam relies on; DeepSpeed 0.19.8's own are checked by the integration tests."""
    text = OPS["deepspeed/ops/op_builder/builder.py"]
    assert all(f"def {name}(" in text for name in ("load", "is_compatible", "jit_load", "validate_torch_version"))


def test_jit_compiles_beside_a_damaged_payload(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    path = deepspeed.entry / FOLDER / "cpu/manifest.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert deepspeed.run(EQUIPPED + LOAD, DSOPS_ON_MISS="jit").stdout == "probe cpu_adam\ncompiled cpu_adam\n"


@pytest.mark.parametrize("stream", ["None", "open('/dev/full', 'w', buffering=1)", "closed"])
def test_a_notice_that_cannot_be_written_ends_nothing(deepspeed: FakeDeepSpeed, stream: str) -> None:
    deepspeed.serve()
    setup = "sys.stderr.close()" if stream == "closed" else f"sys.stderr = {stream}"
    done = deepspeed.run(f"import sys; {setup}\n" + dedent(LOAD), DSOPS_SIMD="x86_64")
    assert done.stdout.startswith(str(deepspeed.entry))
    assert done.stdout.count("\n") == 1


def test_ds_report_is_shown_beside_a_wrong_setting(deepspeed: FakeDeepSpeed) -> None:
    deepspeed.serve()
    done = deepspeed.run(REPORT, DSOPS_SIMD="sse9")
    assert done.stdout == "[] -\n[]\n"
    assert done.stderr.startswith("dsops-prebuilt: DSOPS_SIMD=sse9: accepted: ")
