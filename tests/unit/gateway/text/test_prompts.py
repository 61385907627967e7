"""The prompts that an embedding model's authors put in front of texts."""

import pytest

from gateway.text.tokenization import TextPrompts


@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        ({"query": "q: ", "document": "d: ", "passage": "p: "}, None, "q: ", "d: "),
        ({"query": "q: ", "passage": "p: "}, "query", "q: ", "p: "),
        ({"corpus": "c: "}, None, "", "c: "),
        ({"query": "q: "}, "query", "q: ", ""),
        ({"similar": "s: "}, "similar", "s: ", "s: "),
        ({"similar": "s: "}, None, "", ""),
        ({}, None, "", ""),
    ],
)
def test_each_side_of_a_search_has_its_prompt(
    prompts: dict[str, str], default: str | None, query: str, document: str
) -> None:
    """The first of its names counts; the default prompt serves if neither side has one."""
    found = TextPrompts.read({"prompts": prompts, "default_prompt_name": default})
    assert (found.query, found.document) == (query, document)
