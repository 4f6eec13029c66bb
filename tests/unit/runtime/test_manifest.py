from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.fakes import artifact_of, cuda_binding, fused_adam_of, manifest_of, torch_binding

from dsops_prebuilt import ManifestError
from dsops_prebuilt._manifest import Manifest, closure_sha256, file_sha256

MANIFEST = manifest_of(
    artifact_of(),
    artifact_of(file="portable/cpu_adam.so", tier="portable", python=None, torch=None),
    fused_adam_of(cuda=cuda_binding("12.8", ("9.0a", "10.0f"), ("12.0",)), torch=torch_binding(exact="2.8.0a0+nv")),
    provenance=(("compiler", "gcc 10"), ("torch headers", "pytorch.org")),
)


def test_a_manifest_is_what_it_writes() -> None:
    assert Manifest.from_json(MANIFEST.to_json(), "x") == MANIFEST


def test_the_folder_of_record_follows_the_wheel_format() -> None:
    assert (
        manifest_of(distribution="dsops-prebuilt-cu118", version="1.2").dist_info
        == "dsops_prebuilt_cu118-1.2.dist-info"
    )


def refusal(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json(text, "/p/manifest.json")
    return str(caught.value)


def test_text_that_is_no_json_is_refused() -> None:
    assert refusal("{").startswith("/p/manifest.json: not JSON: ")


@pytest.mark.parametrize("text", ["[]", '"x"', "null", "3"])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    assert refusal(text).startswith("/p/manifest.json: $: expected an object, found ")


@pytest.mark.parametrize("schema", [None, 0, 2, "1"])
def test_another_schema_is_refused(schema: object) -> None:
    assert refusal(json.dumps({"schema": schema})) == (
        f"/p/manifest.json: schema {schema!r} is not 1, the one this dsops-prebuilt reads; "
        "install the same version of dsops-prebuilt and of its payloads"
    )


def at(*path: Any) -> Callable[[Any, Any], None]:
    def change(raw: Any, value: Any) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("distribution",), 3, "$.distribution: expected a printable string, found 3"),
    (("version",), None, "$.version: expected a printable string, found None"),
    (("build",), "1", "$.build: expected an integer, found '1'"),
    (("build",), True, "$.build: expected an integer, found True"),
    (("label",), [], "$.label: expected a printable string, found []"),
    (("provenance",), [], "$.provenance: expected an object, found []"),
    (("provenance", "compiler"), 1, "$.provenance.compiler: expected a printable string, found 1"),
    (("artifacts",), {}, "$.artifacts: expected a list, found {}"),
    (("artifacts", 0), "x", "$.artifacts[0]: expected an object, found 'x'"),
    (("artifacts", 0, "file"), 1, "$.artifacts[0].file: expected a printable string, found 1"),
    (("artifacts", 0, "file"), "a\0b", "$.artifacts[0].file: expected a printable string, found 'a\\x00b'"),
    (("artifacts", 0, "needed"), ["\ud800"], "$.artifacts[0].needed[0]: expected a printable string, found '\\ud800'"),
    (
        ("artifacts", 0, "file"),
        "../x.so",
        "$.artifacts[0].file: expected a path below the manifest's folder, found '../x.so'",
    ),
    (
        ("artifacts", 0, "file"),
        "/x.so",
        "$.artifacts[0].file: expected a path below the manifest's folder, found '/x.so'",
    ),
    (("artifacts", 0, "file"), "", "$.artifacts[0].file: expected a path below the manifest's folder, found ''"),
    (("artifacts", 0, "sha256"), None, "$.artifacts[0].sha256: expected a printable string, found None"),
    (("artifacts", 0, "size"), 1.5, "$.artifacts[0].size: expected an integer, found 1.5"),
    (("artifacts", 0, "tier"), "stok", "$.artifacts[0].tier: expected one of stock, portable, found 'stok'"),
    (("artifacts", 0, "op"), None, "$.artifacts[0].op: expected a printable string, found None"),
    (("artifacts", 0, "accelerators"), "cpu", "$.artifacts[0].accelerators: expected a list of strings, found 'cpu'"),
    (("artifacts", 0, "accelerators"), [1], "$.artifacts[0].accelerators[0]: expected a printable string, found 1"),
    (("artifacts", 0, "module"), 1, "$.artifacts[0].module: expected a printable string, found 1"),
    (("artifacts", 0, "machine"), 1, "$.artifacts[0].machine: expected a printable string, found 1"),
    (("artifacts", 0, "simd"), 1, "$.artifacts[0].simd: expected a printable string, found 1"),
    (("artifacts", 0, "simd"), "mmx", "$.artifacts[0].simd: 'mmx' is not a SIMD level"),
    (("artifacts", 0, "glibc"), "2.17", "$.artifacts[0].glibc: expected two integers, found '2.17'"),
    (("artifacts", 0, "glibc"), [2], "$.artifacts[0].glibc: expected two integers, found [2]"),
    (("artifacts", 0, "glibc"), [2, "x"], "$.artifacts[0].glibc[1]: expected an integer, found 'x'"),
    (("artifacts", 0, "python"), 311, "$.artifacts[0].python: expected a printable string, found 311"),
    (("artifacts", 0, "torch"), "2.7", "$.artifacts[0].torch: expected an object, found '2.7'"),
    (("artifacts", 0, "torch", "minor"), 2.7, "$.artifacts[0].torch.minor: expected a printable string, found 2.7"),
    (("artifacts", 0, "torch", "exact"), 2, "$.artifacts[0].torch.exact: expected a printable string, found 2"),
    (("artifacts", 0, "torch", "cxx11_abi"), 1, "$.artifacts[0].torch.cxx11_abi: expected true or false, found 1"),
    (
        ("artifacts", 0, "torch", "built_with"),
        None,
        "$.artifacts[0].torch.built_with: expected a printable string, found None",
    ),
    (("artifacts", 2, "cuda"), [], "$.artifacts[2].cuda: expected an object, found []"),
    (("artifacts", 2, "cuda", "toolkit"), "12", "$.artifacts[2].cuda.toolkit: '12' is not a CUDA release"),
    (("artifacts", 2, "cuda", "sass"), "9.0", "$.artifacts[2].cuda.sass: expected a list of strings, found '9.0'"),
    (("artifacts", 2, "cuda", "sass", 0), "90", "$.artifacts[2].cuda.sass[0]: '90' is not a GPU architecture"),
    (("artifacts", 2, "cuda", "ptx", 0), 9, "$.artifacts[2].cuda.ptx[0]: expected a printable string, found 9"),
    (("artifacts", 0, "sources"), None, "$.artifacts[0].sources: expected a list, found None"),
    (("artifacts", 0, "sources", 0), [], "$.artifacts[0].sources[0]: expected an object, found []"),
    (
        ("artifacts", 0, "sources", 0, "sha256"),
        1,
        "$.artifacts[0].sources[0].sha256: expected a printable string, found 1",
    ),
    (("artifacts", 0, "sources", 0, "closure"), "a", "$.artifacts[0].sources[0].closure: expected a list of strings"),
    (("artifacts", 0, "sources", 0, "deepspeed"), 0, "$.artifacts[0].sources[0].deepspeed: expected a list of strings"),
    (("artifacts", 0, "defines"), {}, "$.artifacts[0].defines: expected a list of strings, found {}"),
    (("artifacts", 0, "needed"), [None], "$.artifacts[0].needed[0]: expected a printable string, found None"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[f"{w[0]}={w[1]!r}" for w in WRONG])
def test_a_wrong_value_is_named_with_its_path(path: tuple[Any, ...], value: Any, message: str) -> None:
    raw = json.loads(MANIFEST.to_json())
    at(*path)(raw, value)
    assert refusal(json.dumps(raw)).startswith(f"/p/manifest.json: {message}")


def every_object(raw: Any, where: str = "$") -> list[tuple[str, Any]]:
    found = []
    if isinstance(raw, dict):
        found.append((where, raw))
    for key, item in raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ():
        if key != "provenance":
            found += every_object(item, f"{where}.{key}" if isinstance(raw, dict) else f"{where}[{key}]")
    return found


PLACES = [where for where, _ in every_object(json.loads(MANIFEST.to_json()))]


@pytest.mark.parametrize("place", PLACES)
def test_a_missing_and_an_unknown_key_are_refused_at_every_level(place: str) -> None:
    raw = json.loads(MANIFEST.to_json())
    target = dict(every_object(raw))[place]
    target["surprise"] = 1
    assert f"{place}: expected the keys" in refusal(json.dumps(raw))
    del target["surprise"]
    target.pop(next(key for key in target if key != "schema"))
    assert f"{place}: expected the keys" in refusal(json.dumps(raw))


def test_a_closure_digest_depends_on_names_bytes_and_order_and_not_on_the_folder(tmp_path: Path) -> None:
    digests = []
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder / "x").mkdir(parents=True)
        (tmp_path / folder / "x/k.cpp").write_bytes(content)
        (tmp_path / folder / "h.h").write_bytes(b"")
        digests.append(closure_sha256(tmp_path / folder, ["x/k.cpp", "h.h"]))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
    assert closure_sha256(tmp_path / "a", ["h.h", "x/k.cpp"]) != digests[0]
    with pytest.raises(OSError, match=r"no\.h"):
        closure_sha256(tmp_path / "a", ["no.h"])


def test_moving_bytes_between_files_of_a_closure_changes_its_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xy")
    (tmp_path / "b").write_bytes(b"")
    before = closure_sha256(tmp_path, ["a", "b"])
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"y")
    assert closure_sha256(tmp_path, ["a", "b"]) != before


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
