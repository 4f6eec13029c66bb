"""Say what went wrong: one root, one class for each thing a caller may want to tell apart."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Iterable


class DsopsError(Exception):
    """Root of every error of this package.

    ``exit_code`` is what ``dsops`` returns to the shell when the error ends it; codes are unique.
    """

    exit_code = 1


class UsageError(DsopsError):
    """A word of the caller is not one of those accepted (argument, environment variable)."""

    exit_code = 2


class ManifestError(DsopsError):
    """A payload's ``manifest.json`` cannot be read or does not have the shape of its schema version."""

    exit_code = 3


class IntegrityError(DsopsError, ImportError):
    """A file's sha256 is not the one recorded for it; it is refused before it is opened."""

    exit_code = 4


class NoArtifactError(DsopsError, ImportError):
    """No artifact may be loaded here; the message is the answer on one screen."""

    exit_code = 5


class LoadError(DsopsError, ImportError):
    """An artifact was chosen and is intact, and the dynamic loader or its initialiser refused it."""

    exit_code = 6


def one_of(word: str, accepted: Iterable[str]) -> str:
    """The end of a sentence about a word that is none of those accepted: the nearest one, and all of them."""
    words = list(accepted)
    near = get_close_matches(word, words, 1)
    return f"{f'did you mean {near[0]}? ' if near else ''}accepted: {', '.join(words)}"
