"""Read a YAML file into plain values, each with its line and its spelling; nothing is guessed from a type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dsops_builder.faults import Fault, Faults, Location

UNQUOTED = {"number", "boolean", "date"}
"""Kinds of scalars that YAML took for something other than the text that their author may have meant."""

_KINDS = {"float": "number", "int": "number", "bool": "boolean", "timestamp": "date", "null": "nothing"}
_TAGS = {"map", "seq", "str", *_KINDS}
_CORE = "tag:yaml.org,2002:"
_DIGITS = 18
_LONGEST = 72
"""Characters of a value that a message quotes; a sha256 in quotes fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A scalar that is neither text nor an integer: ``3.10``, ``true``, ``~``. No field of ours takes one."""

    kind: str


Value = str | int | Odd | tuple["Value", ...] | dict[str, "Value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlFile:
    """A file's content, and for each location the line (from 1), the spelling and the kind of what stands there."""

    name: str
    root: Value
    lines: dict[Location, int]
    spellings: dict[Location, str]
    kinds: dict[Location, str]

    def fault(self, where: Location, text: str) -> Fault:
        """A fault at ``where``, or at the nearest place around it that the file has (for a key that is missing)."""
        place = where
        while place not in self.lines:
            place = place[:-1]
        return Fault(file=self.name, line=self.lines[place], where=where, text=text)

    def at(self, where: Location) -> Value | None:
        """The value at ``where``; None when the file has nothing there."""
        value: Value = self.root
        for part in where:
            if isinstance(value, dict) and isinstance(part, str) and part in value:  # noqa: SIM114  mypy
                value = value[part]
            elif isinstance(value, tuple) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value

    def keys(self, *where: str | int) -> tuple[str, ...]:
        """Keys of the mapping at ``where``; empty when there is none."""
        value = self.at(where)
        return tuple(value) if isinstance(value, dict) else ()

    def items(self, *where: str | int) -> tuple[Location, ...]:
        """Locations of the items of the list at ``where``; empty when there is none."""
        value = self.at(where)
        return tuple((*where, index) for index in range(len(value))) if isinstance(value, tuple) else ()

    def text(self, *where: str | int) -> str | None:
        """The text at ``where``, or what was meant as one (an unquoted ``3.10``); None when there is neither."""
        value = self.at(where)
        if isinstance(value, str):
            return value
        return self.spellings[where] if self.kinds.get(where) in UNQUOTED else None

    def texts(self, *where: str | int) -> dict[Location, str]:
        """The texts of the list at ``where`` by their location; items of other kinds are left out."""
        return {item: text for item in self.items(*where) if (text := self.text(*item)) is not None}


def read_yaml(path: Path, faults: Faults) -> YamlFile | None:
    """Read one document. What makes a file unusable goes into ``faults``, and None comes back."""
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        faults.add(Fault(file=name, line=None, where=(), text=f"cannot be read: {error.strerror}"))
        return None
    except UnicodeDecodeError as error:
        faults.add(Fault(file=name, line=None, where=(), text=f"is not UTF-8 text: {error.reason}"))
        return None
    try:
        node = YAML(typ="safe", pure=True).compose(text)
        if isinstance(node, MappingNode):
            walk = _Walk(name=name, source=text, faults=faults)
            root = walk.value(node, ())
            return YamlFile(name=name, root=root, lines=walk.lines, spellings=walk.spellings, kinds=walk.kinds)
    except RecursionError:
        faults.add(Fault(file=name, line=None, where=(), text="is nested too deeply to be read"))
        return None
    except (ValueError, OverflowError) as error:
        # What an escape leaves ruamel with that is no character (\U00110000).
        faults.add(Fault(file=name, line=None, where=(), text=f"not YAML: {error}"))
        return None
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        # ruamel says what it was doing ("while parsing a flow sequence") and then what was wrong there.
        parts = [str(getattr(error, part, None) or "") for part in ("context", "problem")]
        what = ", ".join(filter(None, parts)) or str(error).splitlines()[0]
        faults.add(Fault(file=name, line=None if mark is None else mark.line + 1, where=(), text=f"not YAML: {what}"))
        return None
    found = "nothing" if node is None else _Walk.kind_of(node)
    faults.add(Fault(file=name, line=1, where=(), text=f"found {found}, accepted a mapping of keys to values"))
    return None


@dataclass(kw_only=True, slots=True)
class _Walk:
    """Turns ruamel's nodes into values. Each node is met once: an alias would make two places share one line."""

    name: str
    source: str
    faults: Faults
    lines: dict[Location, int] = field(default_factory=dict)
    spellings: dict[Location, str] = field(default_factory=dict)
    kinds: dict[Location, str] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)

    @staticmethod
    def kind_of(node: Node) -> str:
        if isinstance(node, MappingNode):
            return "a mapping"
        if isinstance(node, SequenceNode):
            return "a list"
        return _KINDS.get(str(node.tag).removeprefix(_CORE), "text")

    def value(self, node: Node, where: Location, line: int | None = None) -> Value:
        self.lines[where] = node.start_mark.line + 1 if line is None else line
        self.kinds[where] = self.kind_of(node)
        self.spellings[where] = self._spelling(node, where)
        if id(node) in self.met:
            self._fault(where, node, "an alias (*name); write the value out")
            return Odd(kind="alias")
        self.met.add(id(node))
        if str(node.tag).removeprefix(_CORE) not in _TAGS:
            self._fault(where, node, f"found the tag {node.tag}, accepted a value without a tag")
        if isinstance(node, SequenceNode):
            return tuple(self.value(item, (*where, index)) for index, item in enumerate(node.value))
        if isinstance(node, MappingNode):
            return self._mapping(node, where)
        return self._scalar(node)

    def _mapping(self, node: MappingNode, where: Location) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for key, item in node.value:
            if not isinstance(key, ScalarNode):
                self._fault(where, key, f"found {self.kind_of(key)} as a key, accepted a word")
                continue
            place = (*where, key.value)
            tag = str(key.tag).removeprefix(_CORE)
            if tag == "null":
                self._fault(where, key, "found nothing as a key, accepted a word")
                continue
            # Of what YAML takes for something else only 3.10 can have been meant as one of our keys: the check of the
            # shape refuses 7 and true with the words that it accepts.
            if tag == "float":
                self._fault(place, key, f'{key.value} is a number; write it quoted, "{key.value}"')
            if key.value in values:
                self._fault(place, key, f"a second time; the first is on line {self.lines[place]}")
                continue
            values[key.value] = self.value(item, place, key.start_mark.line + 1)
        return values

    def _scalar(self, node: Node) -> Value:
        tag = str(node.tag).removeprefix(_CORE)
        text = str(node.value)
        if tag == "str":
            return text
        # Only the plain spelling of an integer is one: 010 and 1_0 are accidents here, and so are hundreds of digits.
        plain = text == (text.lstrip("0") or "0") and text.isdigit() and len(text) <= _DIGITS
        return int(text) if tag == "int" and plain else Odd(kind=tag)

    def _spelling(self, node: Node, where: Location) -> str:
        kind = self.kinds[where]
        if kind.startswith("a ") or kind == "nothing":
            return kind
        written = self.source[node.start_mark.index : node.end_mark.index].strip()
        short = written[:_LONGEST].partition("\n")[0]
        return written if short == written else f"{short}..."

    def _fault(self, where: Location, node: Node, text: str) -> None:
        # An alias is the node of its anchor, so its line is known from the key only.
        line = self.lines[where] if id(node) in self.met else node.start_mark.line + 1
        self.faults.add(Fault(file=self.name, line=line, where=where, text=text))


__all__ = ["UNQUOTED", "Odd", "Value", "YamlFile", "read_yaml"]
