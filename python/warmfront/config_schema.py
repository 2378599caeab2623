"""What the configuration tree says about itself: field documentation and JSON Schema.

The docstring below each field of `config.py` is the only place where a field is described; it is read from the source,
since Python keeps no docstrings of fields. The reference page and the schema both come from here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec import inspect as msgspec_inspect

from warmfront import config

TAG = "Which of these mappings it is."
"""Description of `type`, the tag of a union, which is no field of a struct."""
UNSAID = (config.SECONDS_MAX, config.COUNT_MAX)
"""Bounds that only keep numbers out of which no clock and no sum can be made: said once for all fields."""


class Field(Struct, frozen=True):
    """One value of the configuration."""

    path: str
    """As in `--set`, for example `front.listen`; list items are `[]`, mapping values `<name>`."""
    type: str
    default: str
    """As YAML; `required` where there is none."""
    doc: str


class Section(Struct, frozen=True):
    """One struct of the tree."""

    path: str
    doc: str
    fields: list[Field]


def sections() -> list[Section]:
    """Return the tree flat, parents before children, in the order of the source."""
    return list(_walk(config.Config, ""))


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a configuration file, with the fields' documentation as descriptions."""
    tree = msgspec.json.schema(config.Config)
    for name, definition in tree["$defs"].items():
        described = docs(getattr(config, name))
        for field, node in definition.get("properties", {}).items():
            node["description"] = described.get(field, TAG)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "warmfront configuration"} | tree


@cache
def docs(struct: type[Struct]) -> dict[str, str]:
    """Return the docstring below each field, joined to one line; missing ones are absent."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _text(below) is not None:
            found[field.target.id] = " ".join((_text(below) or "").split())
    return found


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _walk(struct: type[Struct], path: str) -> Iterator[Section]:
    described = docs(struct)
    fields, children = [], []
    for field in msgspec.structs.fields(struct):
        info = msgspec_inspect.type_info(field.type)
        where = f"{path}.{field.name}" if path else field.name
        children += [(child, where + suffix) for child, suffix in _children(info)]
        if not isinstance(info, msgspec_inspect.StructType):
            fields.append(Field(where, _type_words(info), _default(field), described.get(field.name, "")))
    yield Section(path, inspect.getdoc(struct) or "", fields)
    for child_struct, where in children:
        yield from _walk(child_struct, where)


def _children(info: msgspec_inspect.Type) -> list[tuple[type[Struct], str]]:
    """The structs inside a type, and how their paths go on."""
    match info:
        case msgspec_inspect.StructType():
            return [(info.cls, "")]
        case msgspec_inspect.ListType(item_type=msgspec_inspect.StructType() as item):
            return [(item.cls, "[]")]
        case msgspec_inspect.ListType(item_type=msgspec_inspect.UnionType(types=types)):
            tagged = [member for member in types if isinstance(member, msgspec_inspect.StructType)]
            return [(member.cls, f"[type={member.tag}]") for member in tagged]
        case msgspec_inspect.DictType(value_type=msgspec_inspect.StructType() as value):
            return [(value.cls, ".<name>")]
        case msgspec_inspect.UnionType(types=types):
            return next((found for member in types if (found := _children(member))), [])
        case _:
            return []


def _type_words(info: msgspec_inspect.Type) -> str:
    match info:
        case msgspec_inspect.Metadata(type=inner):
            return _type_words(inner)
        case msgspec_inspect.IntType() | msgspec_inspect.FloatType():
            return ("integer" if isinstance(info, msgspec_inspect.IntType) else "number") + _range(info)
        case msgspec_inspect.StrType():
            return "text"
        case msgspec_inspect.BoolType():
            return "true or false"
        case msgspec_inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case msgspec_inspect.UnionType(types=types):
            return " or ".join(_type_words(member) for member in types)
        case msgspec_inspect.NoneType():
            return "null"
        case msgspec_inspect.ListType():
            return "list"
        case _:
            return "mapping"


def _range(info: msgspec_inspect.IntType | msgspec_inspect.FloatType) -> str:
    bounds = {"> ": info.gt, "≥ ": info.ge, "< ": info.lt, "≤ ": info.le}
    said = [f"{sign}{bound}" for sign, bound in bounds.items() if bound not in (None, *UNSAID)]
    return f" {' and '.join(said)}" if said else ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not NODEFAULT:
        return msgspec.json.encode(field.default).decode()
    if field.default_factory is not NODEFAULT:
        return msgspec.json.encode(field.default_factory()).decode()
    return "required"
