"""Check a file's values against a pydantic model, and word what pydantic found as faults of the file."""

from __future__ import annotations

import re
from typing import TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsops_builder.faults import Faults, Location, differs, listed, nearest, suggestion
from dsops_builder.yamlfile import UNQUOTED, YamlFile

_ACCEPTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}

Model = TypeVar("Model", bound=BaseModel)


def check_shape(model: type[Model], file: YamlFile, faults: Faults) -> Model | None:
    """Return the validated value, or None when there are faults of shape, which have gone into ``faults``."""
    try:
        return model.model_validate(file.root)
    except ValidationError as error:
        misspelt = {_meant(model, detail) for detail in error.errors() if detail["type"] == "extra_forbidden"}
        for detail in error.errors():
            # A key that is missing because it is misspelt has its one fault where it stands.
            if detail["type"] != "missing" or detail["loc"] not in misspelt:
                faults.add(file.fault(*_worded(model, file, detail)))
        return None


def _meant(model: type[BaseModel], detail: ErrorDetails) -> Location:
    """Where the key would be that the unknown key of ``detail`` comes nearest to."""
    *parents, key = detail["loc"]
    return (*parents, nearest(str(key), _keys(model, tuple(parents))) or key)


def _worded(model: type[BaseModel], file: YamlFile, detail: ErrorDetails) -> tuple[Location, str]:
    # "[key]" is pydantic's mark for a fault of the key itself (of a dict with constrained keys).
    is_key = detail["loc"][-1:] == ("[key]",)
    where = detail["loc"][:-1] if is_key else detail["loc"]
    kind = detail["type"]
    if kind == "missing":
        return where, f"is missing; accepted here: {listed(_keys(model, where[:-1]))}"
    if kind == "extra_forbidden":
        key, keys = str(where[-1]), _keys(model, where[:-1])
        return where, differs(f'the unknown key "{key}"', listed(keys), suggestion(key, keys))
    context = detail.get("ctx", {})
    words = context.get("words", ())
    accepted = str(context.get("accepted") or _ACCEPTED.get(kind, detail["msg"]))
    if kind == "literal_error":
        # pydantic's own listing of a Literal: 'host' or 'cuda'.
        words = re.findall(r"'([^']+)'", context["expected"])
        accepted = context["expected"].replace("'", "")
    if is_key:
        return where, differs(f'the key "{where[-1]}"', accepted)
    spelling = file.spellings[where]
    if file.kinds[where] in UNQUOTED and kind in {"string_type", "accepted"}:
        return where, f'{spelling} is a {file.kinds[where]}; write it quoted, "{spelling}"'
    if file.at(where) == ():
        spelling = "an empty list"
    return where, differs(spelling, accepted, suggestion(file.text(*where) or "", words))


def _keys(model: object, where: Location) -> tuple[str, ...]:
    """Keys that the model accepts at ``where``: the fields of the model that the annotations lead to."""
    for part in where:
        model = _inner(model, part)
    return tuple(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else ()


def _inner(annotation: object, part: str | int) -> object:
    """The annotation one step further in: of a model's field, a dict's values or a tuple's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.model_fields[str(part)].annotation
    return get_args(annotation)[-1 if get_origin(annotation) is dict else 0]
