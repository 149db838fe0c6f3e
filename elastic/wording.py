"""What pydantic found, as one line that names the field and the cure. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}


def one_line(error: ValidationError, model: type[BaseModel], notes: dict[str, str]) -> str:
    """The first finding as `section.field: what is wrong; what to do`, and how many more there are.

    `notes` says more about a pydantic string pattern, by field.
    """
    found = error.errors(include_url=False)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return _finding(found[0], model, notes) + more


def _finding(found: ErrorDetails, model: type[BaseModel], notes: dict[str, str]) -> str:
    loc, kind, given = found["loc"], found["type"], found["input"]
    key = dotted(loc)
    context = found.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_known(loc, model)}"
    if kind == "missing":
        return f"{key}: missing; set it"
    if kind == "value_error":
        return _own_message(loc, str(context.get("error", found["msg"])), model)
    if kind in EXPECTED:
        return f"{key}: expected {EXPECTED[kind]}, got {_shown(given)}"
    if kind == "literal_error":
        return f"{key}: expected {context['expected']}, got {_shown(given)}"
    if kind == "string_pattern_mismatch" and key in notes:
        return f"{key}: {notes[key]}, got {_shown(given)}"
    for limit, word in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if limit in context:
            return f"{key}: must be {word} {context[limit]}, got {_shown(given)}"
    text = found["msg"]
    return f"{key}: {text[:1].lower()}{text[1:]}, got {_shown(given)}"


def dotted(loc: Sequence[int | str]) -> str:
    """('faults', 0, 'at_step') -> faults[0].at_step"""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _own_message(loc: Sequence[int | str], message: str, model: type[BaseModel]) -> str:
    """A rule's own text begins with its field or with the field's whole name; the section in front is ours."""
    section = model_at(loc, model)
    first = re.match(r"([A-Za-z_]+)(\.[A-Za-z_]+)*", message)
    name = first.group(1) if first else ""
    if first is not None and name in model.model_fields and (first.group(2) or not loc):
        return message
    if section is not None and name in section.model_fields:
        rest = message[len(name) :]
        return f"{dotted([*loc, name])}{': ' + rest[4:] if rest.startswith(' is ') else rest}"
    return f"{dotted(loc)}: {message}" if loc else message


def _known(loc: Sequence[int | str], model: type[BaseModel]) -> str:
    section = model_at(loc[:-1], model)
    names = sorted(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.7)
    if close:
        return f"did you mean {dotted([*loc[:-1], close[0]])}?"
    place = f"in {dotted(loc[:-1])}" if len(loc) > 1 else "at the top"
    return f"the keys {place} are {', '.join(names)}"


def model_at(loc: Sequence[int | str], model: type[BaseModel]) -> type[BaseModel] | None:
    """The section that a place in the job file belongs to."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            return None
        model = inner
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    arguments = getattr(annotation, "__args__", ())
    return next((m for m in map(_model_in, arguments) if m is not None), None)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
