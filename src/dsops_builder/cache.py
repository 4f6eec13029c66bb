"""Keep what is pure: name it by what decides it, and put it into the cache whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_key(inputs: Iterable[str], recipe: Iterable[str]) -> str:
    """A short name for what comes of ``inputs`` when the modules whose files are ``recipe`` work on them."""
    texts = [*inputs, *(Path(file).read_text(encoding="utf-8") for file in recipe)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Give a scratch folder that becomes ``path`` when the block ends well, and nothing when it does not.

    Where another process has made ``path`` in the meantime, from the same inputs, that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        if scratch.exists():
            shutil.rmtree(scratch)
