"""The gates of the wheel that holds the loader: its package, the hook that starts it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from configparser import Error as ConfigError
from configparser import RawConfigParser

from dsops_builder.gates import Failure
from dsops_builder.verify.opened import Opened
from dsops_prebuilt._manifest import FOLDER

_HOOK = ("dsops_prebuilt_activate.py", "dsops_prebuilt_activate.pth", "dsops_prebuilt_activate.start")
_LOADER_METADATA = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")
_ENTRY_POINT = {"dsops_prebuilt": "dsops_prebuilt_activate:install"}


def check_loader(opened: Opened) -> Iterator[Failure]:
    """Beside the payload of a platform wheel there is pure Python: the package, and the hook that starts it."""
    name, info, shared = opened.path.name, opened.dist_info, opened.shared
    own = {*_HOOK, *(f"{info}/{each}" for each in _LOADER_METADATA)}
    payload = () if opened.pure else tuple(each for each in opened.names if each.startswith(f"{FOLDER}/"))
    for each in sorted(set(opened.names) - set(payload)):
        package = each.startswith("dsops_prebuilt/") and each.endswith((".py", "/py.typed"))
        if each in shared or not (package or each in own or each.startswith(f"{info}/licenses/")):
            wanted = "only dsops_prebuilt/, dsops_prebuilt_activate.* and metadata"
            yield Failure(gate="contents", file=each, found="a file that the loader does not have", wanted=wanted)
    for each in ("dsops_prebuilt/__init__.py", *_HOOK):
        if each not in opened.names:
            yield Failure(gate="contents", file=name, found=f"no {each}", wanted="it")
    entry_points = RawConfigParser(delimiters=("=",))
    try:
        entry_points.read_string(opened.read(f"{info}/entry_points.txt").decode())
        found = str(dict(entry_points.items("torch.backends")))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        found = str(error).replace("\n", " ")
    if found != str(_ENTRY_POINT):
        yield Failure(gate="entry point", file=name, found=found, wanted=f"{_ENTRY_POINT} in torch.backends")
