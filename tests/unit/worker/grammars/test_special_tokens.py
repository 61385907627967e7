"""A model may use the special tokens that a structural tag writes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers

from protos.errors import InvalidArgument
from tests.support.worker.grammar_harness import END, SMOLLM2, VOCAB, allowed, matcher_of
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec

MARKS = ("<|key|>", "<|value|>", "<|end|>")
SPECIALS = ("[TOOL_CALLS]", "[ARGS]", "</think>", "<\uff5ccalls\u2581begin\uff5c>", *MARKS)
SIZE = VOCAB + 10
Model = tuple[GrammarCompiler, tokenizers.Tokenizer]

ARGUMENTS = {
    "type": "json_schema",
    "json_schema": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
}
CALL = {"type": "tag", "begin": "[TOOL_CALLS]f[ARGS]", "content": ARGUMENTS, "end": ""}
REQUIRED = {"type": "tags_with_separator", "tags": [CALL], "separator": "", "at_least_one": True}
OPTIONAL = {"type": "triggered_tags", "triggers": ["[TOOL_CALLS]"], "tags": [CALL], "at_least_one": False}
THINKING = {"type": "sequence", "elements": [
    {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": ["</think>"]}, "end": "</think>"},
    {"type": "json_schema", "json_schema": {"type": "integer"}}]}  # fmt: skip


def spec(form: object) -> Spec:
    """Returns the spec of a structural tag."""
    return Spec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A compiler for SmolLM2's vocabulary with additional special tokens, and that tokenizer."""
    if not SMOLLM2.is_dir():
        pytest.skip("SmolLM2 is not fetched; run make models")
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    made = GrammarCompiler(folder, SIZE, [END])
    yield made, tokenizer
    made.close()


def accepts(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """Whether the matcher accepts these tokens in a row."""
    return all(matcher.accept(token) for token in tokens)


@pytest.mark.parametrize("form", [REQUIRED, OPTIONAL])
def test_a_call_may_start_with_the_models_marker(model: Model, form: object) -> None:
    """It may also start with the marker's letters. Markers that the tag does not write stay forbidden."""
    compiler, tokenizer = model
    ids = {text: tokenizer.token_to_id(text) for text in (*SPECIALS, "<|im_start|>")}
    call = tokenizer.encode('[TOOL_CALLS]f[ARGS]{"x": 3}').ids
    assert ids["[TOOL_CALLS]"] in call
    assert ids["[ARGS]"] in call
    matcher = matcher_of(spec(form), compiler)
    first = set(allowed(matcher, SIZE))
    assert ids["[TOOL_CALLS]"] in first
    assert not first & {ids["</think>"], ids[SPECIALS[3]], ids["<|im_start|>"]}
    assert accepts(matcher, call)
    assert END in set(allowed(matcher, SIZE))
    letters = tokenizer.encode("[").ids + tokenizer.encode("TOOL").ids + tokenizer.encode("_CALLS").ids
    assert accepts(matcher_of(spec(form), compiler), letters)


@pytest.mark.parametrize(
    ("style", "good", "bad"),
    [
        ({"type": "tagged", "key": "<|key|>", "key_end": "<|value|>", "json_key_ends": [], "value_end": "<|end|>"},
         ["<|key|>a<|value|>x\n</b>é<|end|><|key|>n<|value|>5<|end|>", "<|key|>a<|value|><|end|><|key|>n<|value|>5<|end|>"],
         ["<|key|>a<|value|>x<|value|>y<|end|>", "<|key|>a<|end|>", "<|key|>a<|value|>x<|end|><|key|>n<|value|>y<|end|>"]),
        ({"type": "loose", "quote": "<|value|>"}, ["{a:<|value|>x,}<|value|>,n:5}"], ["{a:<|value|>x<|end|>,n:5}"]),
        ({"type": "elements", "prefix": "<|key|>"}, ["<|key|><a>x<b><|key|></a><|key|><n>5<|key|></n>"],
         ["<|key|><a>x<|end|></a><|key|><n>5<|key|></n>", "<|key|><a>x<|key|></n>"]),
    ],
)  # fmt: skip
def test_values_between_the_models_markers(
    model: Model, style: dict[str, object], good: list[str], bad: list[str]
) -> None:
    """Strings in the notations of calls may end with tokens, and contain none."""
    compiler, tokenizer = model
    properties = {"a": {"type": "string"}, "n": {"type": "integer"}}
    schema = {"properties": properties, "required": ["a", "n"], "additionalProperties": False}
    form = spec({"type": "json_schema", "json_schema": schema, "style": style})
    for text in good:
        matcher = matcher_of(form, compiler)
        assert accepts(matcher, tokenizer.encode(text).ids)
        assert END in set(allowed(matcher, SIZE))
        spelled = [token for char in text for token in tokenizer.encode(char).ids]
        assert accepts(matcher_of(form, compiler), spelled)
    for text in bad:
        assert not accepts(matcher_of(form, compiler), tokenizer.encode(text).ids)


def test_thinking_may_end_with_the_models_marker(model: Model) -> None:
    compiler, tokenizer = model
    matcher = matcher_of(spec(THINKING), compiler)
    assert accepts(matcher, tokenizer.encode("Hm.</think>").ids)
    after = set(allowed(matcher, SIZE))
    assert tokenizer.encode("a").ids[0] not in after
    assert tokenizer.token_to_id("</think>") not in after
    assert accepts(matcher, [*tokenizer.encode("12").ids, END])


def test_markers_may_have_non_ascii_texts(model: Model) -> None:
    compiler, tokenizer = model
    matcher = matcher_of(spec({"type": "const_string", "value": f"{SPECIALS[3]}f"}), compiler)
    marker = tokenizer.token_to_id(SPECIALS[3])
    assert marker is not None
    assert accepts(matcher, [marker, tokenizer.encode("f").ids[0], END])


@pytest.mark.parametrize("by_text", [True, False])
def test_tags_name_tokens_by_text_or_id(model: Model, *, by_text: bool) -> None:
    """A named special token cannot be spelled in letters. An unknown token is refused by name."""
    compiler, tokenizer = model
    ends, letter = tokenizer.token_to_id("</think>"), tokenizer.encode("f").ids[0]
    assert ends is not None
    thoughts = {"type": "any_tokens", "exclude_tokens": ["</think>" if by_text else ends]}
    tag = {"type": "tag", "begin": {"type": "token", "token": "f" if by_text else letter}, "content": thoughts,
           "end": {"type": "token", "token": "</think>" if by_text else ends}}  # fmt: skip
    matcher = matcher_of(spec(tag), compiler)
    assert set(allowed(matcher, SIZE)) == {letter}
    assert accepts(matcher, [letter, *tokenizer.encode("</").ids])
    assert accepts(matcher, [ends, END])
    with pytest.raises(InvalidArgument, match="names the token 'no such'"):
        compiler.submit(spec({"type": "token", "token": "no such"})).result()


def test_markers_do_not_change_other_grammars(model: Model) -> None:
    """Expressions and schemas with a marker's text allow no special token.

    A tag allows the same ordinary tokens.
    """
    compiler, tokenizer = model
    specials = {tokenizer.token_to_id(text) for text in SPECIALS}
    assert not set(allowed(matcher_of(Spec("regex", r"\[TOOL_CALLS\].*"), compiler), SIZE)) & specials
    assert not set(allowed(matcher_of(Spec("json_schema", '{"const": "[ARGS]"}'), compiler), SIZE)) & specials
    plain = GrammarCompiler(SMOLLM2, SIZE, [END])
    try:
        for form in (REQUIRED, OPTIONAL, THINKING):
            with_markers = set(allowed(matcher_of(spec(form), compiler), SIZE))
            assert with_markers - specials == set(allowed(matcher_of(spec(form), plain), SIZE))
    finally:
        plain.close()


def test_free_text_before_a_special_token_is_limited(model: Model) -> None:
    compiler, tokenizer = model
    tag = {"type": "tag", "begin": "", "content": {"type": "any_text", "max_chars": 3}, "end": "</think>"}
    for end in ("</think>", {"type": "token", "token": "</think>"}):
        for text, accepted in (("</think>", True), ("abc</think>", True), ("abcd</think>", False)):
            matcher = matcher_of(spec({**tag, "end": end}), compiler)
            assert accepts(matcher, tokenizer.encode(text).ids) is accepted


def test_white_space_in_a_tags_json_is_limited(model: Model) -> None:
    compiler, tokenizer = model
    for spaces, accepted in ((8, True), (9, False), (500, False)):
        matcher = matcher_of(spec(REQUIRED), compiler)
        text = "[TOOL_CALLS]f[ARGS]{" + " " * spaces + '"x": 3}'
        assert accepts(matcher, tokenizer.encode(text).ids) is accepted
