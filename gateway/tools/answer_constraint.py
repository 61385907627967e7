"""What a request's answer must match, as a part of the structural tag that holds all of the output."""

import json
from collections.abc import Callable
from typing import Any

from gateway.tools.tags import Tag, json_schema, one_of, structural, tag
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb


def place_constraint(
    asked: pb.StructuredOutput, place: Callable[[Tag], Tag], param: str
) -> pb.StructuredOutput:
    """A constraint for the whole output, in which ``asked`` holds only the answer.

    Args:
        asked: what the client asked for.
        place: puts it where it belongs; what it returns as it is needs no place.
        param: the client's name of it.

    Raises:
        InvalidArgument: if it is no JSON where it must be, lacks what it needs, or is nested too deep.
    """
    try:
        form = _form(asked)
        whole = place(form)
        return asked if whole is form else structural(whole)
    except RecursionError as error:
        raise InvalidArgument(
            f"'{param}' is nested too deep; at most 64 levels are compiled", param=param
        ) from error
    except ValueError as error:
        raise InvalidArgument(f"'{param}' cannot be read: {error}", param=param) from error


def _form(asked: pb.StructuredOutput) -> Tag:
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
    """What a structural tag holds the output to; tags of the older form (``structures``, ``triggers``) are rewritten."""
    if not isinstance(tag_, dict):
        raise ValueError("a structural tag must be a JSON object")  # noqa: TRY004 - told as what cannot be read
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
