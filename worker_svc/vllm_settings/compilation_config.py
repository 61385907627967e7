"""vLLM's `--compilation-config`: JSON, a Python literal or a level."""

import ast
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


def literal(text: str) -> Any:
    """Returns the value of JSON or of a Python literal.

    Raises:
        ValueError: The text is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError('should be a level or JSON, for example {"level": 3}') from error


class CompilationConfig(BaseModel):
    """The fields of vLLM's `--compilation-config` that this worker supports."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    level: int | None = Field(None, ge=0, le=3)
    """The same as `-O`."""
    candidate_compile_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] | None = None
    """Decode buckets to generate kernels for. Default: all."""
