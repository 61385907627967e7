"""Compares answers with their documented types, and resolves the references of the OpenAPI document."""

from typing import Any

from pydantic import BaseModel, TypeAdapter


def check_answer(kind: Any, answer: Any) -> None:
    """Checks that an answer has the fields of the type ``kind``, and no others."""
    assert TypeAdapter(kind).validate_python(answer) == answer


def check_extras(value: Any, *allowed: str) -> None:
    """Fails if an object of a client's types has a field that its type lacks, except those ``allowed``."""
    if isinstance(value, BaseModel):
        assert set(value.model_extra or ()) <= set(allowed), (type(value), value.model_extra)
        for name in value.model_fields_set:
            check_extras(getattr(value, name, None), *allowed)
    elif isinstance(value, list | tuple):
        for item in value:
            check_extras(item, *allowed)


def resolved(node: Any, document: dict[str, Any]) -> Any:
    """Returns a part of the OpenAPI document without references."""
    if isinstance(node, list):
        return [resolved(item, document) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = document["components"]["schemas"][node["$ref"].rpartition("/")[2]]
        return resolved({**target, **{key: value for key, value in node.items() if key != "$ref"}}, document)
    return {key: resolved(value, document) for key, value in node.items()}
