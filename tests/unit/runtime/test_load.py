from __future__ import annotations

import hashlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.runtime.fakes import (
    VERSION,
    FakeHost,
    artifact_of,
    here,
    host_of,
    manifest_of,
    real_extension,
    write_payload,
)

import dsops_prebuilt
from dsops_prebuilt import IntegrityError, LoadError, NoArtifactError, _load
from dsops_prebuilt._load import (
    Installed,
    StockTier,
    Tier,
    find_payloads,
    installed,
    load,
    open_offer,
    refuse_damaged,
    verify,
)
from dsops_prebuilt._manifest import FOLDER, TIERS
from dsops_prebuilt._select import Offer
from dsops_prebuilt._variant import Simd


def found_in(*entries: Path) -> Installed:
    return find_payloads(tuple(map(str, entries)))


def install(entry: Path) -> Offer:
    made, content = here()
    write_payload(entry, manifest_of(made), {made.file: content})
    return found_in(entry).offers[0]


def test_payloads_are_found_on_every_entry_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_payload(first, manifest_of(artifact_of(), label="cu126"), {})
    write_payload(second, manifest_of(artifact_of(), label="cu118", build=2), {})
    write_payload(tmp_path, manifest_of(artifact_of(), label="cpu"), {})
    found = found_in(first, tmp_path / "not-there", second, first, tmp_path)
    assert [(offer.label, offer.build, offer.folder) for offer in found.offers] == [
        ("cu126", 1, str(first / FOLDER / "cu126")),
        ("cu118", 2, str(second / FOLDER / "cu118")),
        ("cpu", 1, str(tmp_path / FOLDER / "cpu")),
    ]
    assert found.faults == ()


def test_a_file_as_path_entry_and_a_folder_without_manifest_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "zip").write_text("")
    (tmp_path / FOLDER / "cu118").mkdir(parents=True)
    assert found_in(tmp_path / "zip", tmp_path) == Installed((), ())


def test_a_payload_of_another_version_is_named_and_not_offered(tmp_path: Path) -> None:
    folder = write_payload(tmp_path, manifest_of(artifact_of(), version="0.0.9"), {})
    found = found_in(tmp_path)
    assert found.offers == ()
    assert found.faults == (
        f"{folder}/manifest.json: dsops-prebuilt-cpu 0.0.9 does not belong to dsops-prebuilt {VERSION}; "
        f"run: pip install --force-reinstall --no-deps dsops-prebuilt-cpu=={VERSION}",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not JSON"), (b"\xff", "codec can't decode"), (b'{"schema": 7}', "schema 7 is not 1")],
    ids=["text", "bytes", "schema"],
)
def test_an_unreadable_manifest_is_a_fault_beside_the_good_ones(tmp_path: Path, content: bytes, message: str) -> None:
    good = install(tmp_path)
    (tmp_path / FOLDER / "broken").mkdir()
    (tmp_path / FOLDER / "broken/manifest.json").write_bytes(content)
    find_payloads.cache_clear()
    found = found_in(tmp_path)
    assert found.offers == (good,)
    assert [
        message in fault and str(tmp_path / FOLDER / "broken/manifest.json") in fault for fault in found.faults
    ] == [True]


def test_the_listing_is_made_once(tmp_path: Path) -> None:
    offer = install(tmp_path)
    (tmp_path / FOLDER / "cpu/manifest.json").unlink()
    assert found_in(tmp_path).offers == (offer,)


def test_an_intact_file_is_verified(tmp_path: Path) -> None:
    offer = install(tmp_path)
    assert verify(offer, found_in(tmp_path)) == tmp_path / FOLDER / "cpu" / offer.artifact.file


def refusal(offer: Offer, entry: Path) -> str:
    with pytest.raises(IntegrityError) as caught:
        open_offer(offer, found_in(entry))
    assert isinstance(caught.value, ImportError)
    return str(caught.value)


AGAIN = f"run: pip install --force-reinstall --no-deps dsops-prebuilt-cpu=={VERSION}"


def test_a_changed_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    offer = install(tmp_path)
    path = tmp_path / FOLDER / "cpu" / offer.artifact.file
    path.write_bytes(b"abc")  # opened, this would be another error
    assert refusal(offer, tmp_path) == (
        f"{path}: its sha256 is ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad, "
        f"and its manifest has {offer.artifact.sha256}; {AGAIN}"
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    offer = install(tmp_path)
    path = tmp_path / FOLDER / "cpu" / offer.artifact.file
    path.unlink()
    assert refusal(offer, tmp_path) == f"{path}: cannot be read (No such file or directory); {AGAIN}"


def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    offer = install(tmp_path)
    path = tmp_path / FOLDER / "cpu" / offer.artifact.file
    path.unlink()
    os.mkfifo(path)
    assert refusal(offer, tmp_path) == f"{path}: no regular file; {AGAIN}"


def test_a_manifest_that_is_no_regular_file_is_damaged(tmp_path: Path) -> None:
    install(tmp_path)
    path = tmp_path / FOLDER / "cpu/manifest.json"
    path.unlink()
    os.mkfifo(path)
    find_payloads.cache_clear()
    assert found_in(tmp_path).damaged == (f"{path}: no regular file; reinstall the distribution that it came with",)


@pytest.mark.parametrize("entry", ["/" + "a" * 5000, "/proc/1/fdinfo/x"], ids=["too long", "not there"])
def test_a_path_entry_that_is_no_place_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    offer = install(tmp_path)
    monkeypatch.setattr(sys, "path", [entry, str(tmp_path)])
    assert _load.installed().offers == (offer,)


def test_a_working_directory_that_was_removed_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, gone = install(tmp_path / "site"), tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "site")])
    assert _load.installed().offers == (offer,)


def test_a_payload_that_cannot_be_used_is_named_beside_the_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_payload(tmp_path / "old", manifest_of(artifact_of(), version="0.0.9"), {})
    offer = install(tmp_path / "new")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "old"), str(tmp_path / "new")])
    load("cpu_adam", None, fitting())
    assert capsys.readouterr().err == (
        f"dsops-prebuilt: {offer} is used, and a payload cannot be: {old}/manifest.json: dsops-prebuilt-cpu 0.0.9 does "
        f"not belong to dsops-prebuilt {VERSION}; {AGAIN}\n"
    )


def damage(entry: Path) -> str:
    """The one sentence about the one payload on this entry, which offers nothing."""
    find_payloads.cache_clear()
    found = found_in(entry)
    assert found.offers == ()
    assert found.faults == found.damaged
    with pytest.raises(IntegrityError) as caught:
        refuse_damaged(found)
    (sentence,) = found.damaged
    assert str(caught.value) == sentence
    return sentence


@pytest.mark.parametrize("change", [b' "build": 2,', b"{", b"\xff"], ids=["a value", "no JSON", "no text"])
def test_a_changed_manifest_is_refused_before_it_is_read(tmp_path: Path, change: bytes) -> None:
    install(tmp_path)
    path = tmp_path / FOLDER / "cpu/manifest.json"
    good = path.read_bytes()
    bad = change if len(change) == 1 else good.replace(b' "build": 1,', change)
    assert bad != good
    path.write_bytes(bad)
    record = tmp_path / f"dsops_prebuilt_cpu-{VERSION}.dist-info/RECORD"
    hashes = [hashlib.sha256(content).hexdigest() for content in (bad, good)]
    assert damage(tmp_path) == f"{path}: its sha256 is {hashes[0]}, and {record} has {hashes[1]}; {AGAIN}"


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    install(tmp_path)
    record = tmp_path / f"dsops_prebuilt_cpu-{VERSION}.dist-info/RECORD"
    record.unlink()
    assert damage(tmp_path) == (
        f"{record}: not there, so {tmp_path / FOLDER / 'cpu/manifest.json'} is not verified; {AGAIN}"
    )


@pytest.mark.parametrize("row", ["", f"{FOLDER}/cpu/manifest.json,,\n", f"{FOLDER}/cpu/manifest.json,md5=abcd,3\n"])
def test_a_record_without_the_manifests_sha256_is_refused(tmp_path: Path, row: str) -> None:
    install(tmp_path)
    (tmp_path / f"dsops_prebuilt_cpu-{VERSION}.dist-info/RECORD").write_text(row)
    assert "manifest.json: its sha256 is " in damage(tmp_path)


def test_an_artifact_is_opened_once_whoever_asks(tmp_path: Path) -> None:
    offer, modules = install(tmp_path), []
    found = found_in(tmp_path)
    threads = [threading.Thread(target=lambda: modules.append(open_offer(offer, found))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    name, _ = real_extension()
    assert len(modules) == len(threads)
    assert {id(module) for module in modules} == {id(modules[0])}
    assert modules[0].__file__ == str(tmp_path / FOLDER / "cpu" / f"{name}_op.so")
    assert modules[0].__name__ == f"deepspeed.ops.adam.{name}"
    assert modules[0].__name__ not in sys.modules


def test_what_the_dynamic_loader_refuses_is_said_with_the_next_step(tmp_path: Path) -> None:
    made, _ = here(sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    folder = write_payload(tmp_path, manifest_of(made), {made.file: b"abc"})
    with pytest.raises(LoadError) as caught:
        open_offer(found_in(tmp_path).offers[0], found_in(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{folder / made.file}: chosen and intact, but it cannot be opened: ")
    assert message.endswith(
        ". Run `dsops explain cpu_adam` and report its output; DSOPS_DISABLE=1 lets DeepSpeed compile the op instead"
    )
    assert isinstance(caught.value.__cause__, ImportError)


def test_the_wrong_init_function_is_a_load_error(tmp_path: Path) -> None:
    made, content = here(module="deepspeed.ops.adam.cpu_adam_op")
    write_payload(tmp_path, manifest_of(made), {made.file: content})
    with pytest.raises(LoadError, match="PyInit_cpu_adam_op"):
        open_offer(found_in(tmp_path).offers[0], found_in(tmp_path))


def test_no_payload_holds_the_reference(tmp_path: Path) -> None:
    write_payload(tmp_path, manifest_of(artifact_of(tier="reference")), {})
    found = found_in(tmp_path)
    assert found.offers == ()
    assert "$.artifacts[0].tier: expected one of stock, portable, found 'reference'" in found.faults[0]


def test_the_payload_that_comes_with_the_loader_is_in_the_loaders_record(tmp_path: Path) -> None:
    made = artifact_of(tier="portable", python=None, torch=None)
    folder = write_payload(tmp_path, manifest_of(made, label="portable", distribution="dsops-prebuilt"), {})
    assert (tmp_path / f"dsops_prebuilt-{VERSION}.dist-info/RECORD").is_file()
    (offer,) = found_in(tmp_path).offers
    assert (offer.label, offer.folder) == ("portable", str(folder))
    again = f"run: pip install --force-reinstall --no-deps dsops-prebuilt=={VERSION}"
    path = folder / made.file
    assert refusal(offer, tmp_path) == f"{path}: cannot be read (No such file or directory); {again}"
    (tmp_path / f"dsops_prebuilt-{VERSION}.dist-info/RECORD").write_text("")
    assert damage(tmp_path).endswith(f"; {again}")


def test_the_stock_tier_is_a_tier() -> None:
    tier: Tier = StockTier()
    assert (tier.name, tier.rank) == ("stock", TIERS.index("stock"))


def fitting(**changes: object) -> FakeHost:
    return FakeHost(simd=Simd.X86_64, **changes)  # type: ignore[arg-type]


def test_load_chooses_verifies_and_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    module = load("cpu_adam", None, fitting())
    assert isinstance(module, ModuleType)
    assert str(module.__file__).startswith(str(tmp_path))


def test_load_of_what_is_not_there_is_the_answer_on_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(NoArtifactError) as caught:
        load("cpu_adam", "cpu", host_of(machine="aarch64"))
    assert (
        str(caught.value).splitlines()[0].startswith("no prebuilt cpu_adam (cpu) can be loaded here: nearest is cpu/")
    )


def test_the_public_functions_are_these() -> None:
    assert dsops_prebuilt.explain("no_such_op", "cpu").chosen is None
    with pytest.raises(NoArtifactError, match=r"^no prebuilt no_such_op \(cpu\) can be loaded here: "):
        dsops_prebuilt.load("no_such_op", "cpu")
    with pytest.raises(AttributeError, match="module 'dsops_prebuilt' has no attribute 'nothing'"):
        dsops_prebuilt.nothing  # noqa: B018
    assert {*dsops_prebuilt.__all__} < {*dir(dsops_prebuilt)}
    assert all(getattr(dsops_prebuilt, name) for name in dsops_prebuilt.__all__)


@pytest.mark.parametrize("kind", ["no text", "folder", "csv", "base64"])
def test_a_record_that_cannot_be_read_is_a_fault_of_its_payload_only(tmp_path: Path, kind: str) -> None:
    good = install(tmp_path / "good")
    install(tmp_path / "bad")
    record = tmp_path / "bad" / f"dsops_prebuilt_cpu-{VERSION}.dist-info/RECORD"
    path = tmp_path / "bad" / FOLDER / "cpu/manifest.json"
    record.unlink()
    content = {
        "no text": b"\xff",
        "csv": b"a," + b"x" * 200000,
        "base64": f"{FOLDER}/cpu/manifest.json,sha256=abcde,3".encode(),
    }
    record.mkdir() if kind == "folder" else record.write_bytes(content[kind])
    find_payloads.cache_clear()
    found = found_in(tmp_path / "bad", tmp_path / "good")
    assert found.offers == (good,)
    (fault,) = found.damaged
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert all(word in fault for word in (str(path), str(record), sha256, AGAIN))
    assert ("abcde" in fault) is (kind == "base64")


@pytest.mark.parametrize("text", ["[" * 100000, "1" * 5000, "{"], ids=["deep", "long number", "half"])
def test_a_manifest_that_json_cannot_read_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER / "cpu").mkdir(parents=True)
    (tmp_path / FOLDER / "cpu/manifest.json").write_text(text)
    found = found_in(tmp_path)
    assert (found.offers, len(found.faults)) == ((), 1)
    if text[0] != "1" or sys.version_info >= (3, 11):
        assert found.damaged == found.faults


def test_a_path_entry_that_is_no_string_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = install(tmp_path)
    monkeypatch.setattr(sys, "path", [tmp_path, ["x"], None, str(tmp_path)])
    assert installed().offers == (offer,)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_another_thread_loads_does_not_wait_for_it() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _load._LOCK:  # noqa: SLF001
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if _load._LOCK.acquire(timeout=5) else 1)  # noqa: SLF001
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
