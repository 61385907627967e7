"""Writes the response object: whole, or as the events of a stream show it."""

from dataclasses import dataclass
from typing import Any, Final

from gateway.answers.generation import Usage
from gateway.http.errors import row_of
from gateway.responses_api.answers import (
    IncompleteDetails,
    OutputItemAnswer,
    ResponseAnswer,
    ResponseFailure,
    ResponseStatus,
    ResponseUsage,
)
from gateway.responses_api.output_items import Output
from gateway.responses_api.request import ResponsesRequest, TextFormat
from gateway.responses_api.tools import (
    Allowed,
    CustomTool,
    Namespace,
    ResponseTool,
    SkippedTool,
    scoped_names,
)
from gateway.schemas.tools import NamedChoice
from protos.errors import InvalidArgument, Overloaded, TriptychError

# The types of errors that the API knows, by ours; all others are the server's.
_ERROR_CODES: Final = ((Overloaded, "rate_limit_exceeded"), (InvalidArgument, "invalid_prompt"))


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The object that a request is answered with; most fields repeat the request."""

    body: ResponsesRequest
    answer_id: str
    created: int
    """Seconds since the epoch."""
    model: str

    def output(self) -> Output:
        """Returns the answer's items, still none."""
        return Output(self.answer_id, scoped_names(self.body.tools))

    def in_progress(self) -> ResponseAnswer:
        """Returns the object of an answer that begins."""
        return self._object("in_progress", [])

    def ended(self, output: list[OutputItemAnswer], usage: Usage, *, cut: bool) -> ResponseAnswer:
        """Returns the object of an answer that is complete, or was ``cut`` at its limit of tokens."""
        if not cut:
            return self._object("completed", output, usage=_usage(usage))
        details: IncompleteDetails = {"reason": "max_output_tokens"}
        return self._object("incomplete", output, usage=_usage(usage), incomplete_details=details)

    def failed(self, output: list[OutputItemAnswer], error: TriptychError) -> ResponseAnswer:
        """Returns the object of an answer that failed after ``output``."""
        known = (code for kind, code in _ERROR_CODES if isinstance(error, kind))
        details: ResponseFailure = {"code": next(known, "server_error"), "message": error.message}
        return self._object("failed", output, error=details)

    def _object(
        self,
        status: ResponseStatus,
        output: list[OutputItemAnswer],
        *,
        usage: ResponseUsage | None = None,
        error: ResponseFailure | None = None,
        incomplete_details: IncompleteDetails | None = None,
    ) -> ResponseAnswer:
        body = self.body
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": _text_options(body),
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools if not isinstance(tool, SkippedTool)],
            "top_logprobs": body.num_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }


def error_event(error: TriptychError) -> dict[str, Any]:
    """Returns the fields of the event for an error in mid-stream."""
    return {"code": row_of(error).code, "message": error.message, "param": error.param or None}


def _usage(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_options(body: ResponsesRequest) -> dict[str, Any]:
    options: dict[str, Any] = {"format": _text_format(body.text_format)}
    if body.text is not None and body.text.verbosity is not None:
        options["verbosity"] = body.text.verbosity
    return options


def _text_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {
        "type": form.type,
        "name": form.name or "answer",
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict,
    }


def _tool(tool: ResponseTool) -> dict[str, Any]:
    if isinstance(tool, SkippedTool):
        return {"type": tool.type}
    if isinstance(tool, Namespace):
        functions = [_tool(function) for _, function in tool.functions]
        return {
            "type": "namespace", "name": tool.name, "description": tool.description or "", "tools": functions,
        }  # fmt: skip
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _tool_choice(body: ResponsesRequest) -> Any:
    names = scoped_names(body.tools)

    def tool(name: str) -> dict[str, Any]:
        is_custom = name in names and names[name].custom
        return {"type": "custom" if is_custom else "function", "name": name}

    match body.tool_choice:
        case NamedChoice(name):
            return tool(name)
        case Allowed(mode, allowed):
            return {"type": "allowed_tools", "mode": mode, "tools": list(map(tool, allowed))}
        case choice:
            return choice or "auto"
