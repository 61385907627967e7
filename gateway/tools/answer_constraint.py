"""A client's constraint as a part of a structural tag that covers the whole output."""

import json
from collections.abc import Callable
from typing import Any

from gateway.tools.tags import Tag, json_schema, one_of, structural, tag
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb


def place_constraint(
    asked: pb.StructuredOutput, place: Callable[[Tag], Tag], param: str
) -> pb.StructuredOutput:
    """Returns a constraint for the whole output, in which ``asked`` covers only the answer.

    Args:
        asked: the client's constraint.
        place: puts the constraint's tag where it belongs; may return it unchanged.
        param: the client's name for the constraint.

    Raises:
        InvalidArgument: if the constraint is invalid JSON, incomplete, or nested too deep.
    """
    try:
        form = _tag_of(asked)
        whole = place(form)
        return asked if whole is form else structural(whole)
    except RecursionError as error:
        raise InvalidArgument(f"'{param}' is nested too deep; use at most 64 levels", param=param) from error
    except ValueError as error:
        raise InvalidArgument(f"'{param}' cannot be read: {error}", param=param) from error


def _tag_of(asked: pb.StructuredOutput) -> Tag:
    match asked.WhichOneof("spec"):
        case "json_schema":
            return json_schema(json.loads(asked.json_schema))
        case "json_object":
            return json_schema({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": asked.regex}
        case "grammar":
            return {"type": "grammar", "grammar": asked.grammar}
        case "choice":
            return one_of(asked.choice.values)
        case _:
            return _format_of(json.loads(asked.structural_tag))


def _format_of(tag_: Any) -> Tag:
    """Returns the format of a structural tag.

    Rewrites tags of the older form (``structures``, ``triggers``).
    """
    if not isinstance(tag_, dict):
        raise ValueError("a structural tag must be a JSON object")  # noqa: TRY004 - as the caller catches
    if "structures" not in tag_:
        if not isinstance(tag_.get("format"), dict):
            raise ValueError("a structural tag needs 'format', an object")
        form: Tag = tag_["format"]
        return form
    structures = tag_["structures"]
    if not isinstance(structures, list) or not all(
        isinstance(each, dict) and {"begin", "schema", "end"} <= each.keys() for each in structures
    ):
        raise ValueError("a structural tag's structures must each have begin, schema and end")
    return {
        "type": "triggered_tags",
        "triggers": tag_.get("triggers"),
        "tags": [tag(each["begin"], json_schema(each["schema"]), each["end"]) for each in structures],
    }
