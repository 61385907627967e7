"""Special tokens that a structural tag writes: a model that was trained to use them may."""

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from protos.errors import InvalidArgument
from tests.support.worker.grammar_harness import END, SMOLLM2, VOCAB
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.compiler_limits import CompilerLimits
from worker_svc.grammars.markers import markers_in
from worker_svc.grammars.masks import Masks
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec

SPECIALS = ("[TOOL_CALLS]", "[ARGS]", "</think>", "<\uff5ccalls\u2581begin\uff5c>")
SIZE = VOCAB + 10

ARGUMENTS = {
    "type": "json_schema",
    "json_schema": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
}
CALL = {"type": "tag", "begin": "[TOOL_CALLS]f[ARGS]", "content": ARGUMENTS, "end": ""}
REQUIRED = {
    "type": "tags_with_separator",
    "tags": [CALL],
    "separator": "",
    "at_least_one": True,
    "stop_after_first": False,
}
OPTIONAL = {
    "type": "triggered_tags",
    "triggers": ["[TOOL_CALLS]"],
    "tags": [CALL],
    "at_least_one": False,
    "stop_after_first": False,
}
THINKING = {"type": "sequence", "elements": [
    {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": ["</think>"]}, "end": "</think>"},
    {"type": "json_schema", "json_schema": {"type": "integer"}}]}  # fmt: skip


def spec(form: object) -> Spec:
    return Spec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GrammarCompiler, tokenizers.Tokenizer]]:
    """SmolLM2's vocabulary with special tokens of our own, which nobody else has."""
    if not SMOLLM2.is_dir():
        pytest.skip("SmolLM2 is not fetched; run make models")
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    made = GrammarCompiler(folder, SIZE, [END])
    yield made, tokenizer
    made.close()


def matcher_of(compiler: GrammarCompiler, asked: Spec) -> Matcher:
    compiler.submit(asked).result()
    grammar = compiler.find(asked)
    assert grammar is not None
    return Matcher(grammar, [END], [])


def allowed(matcher: Matcher) -> set[int]:
    rows = Masks(1, SIZE, torch.device("cpu")).rows
    matcher.fill_mask(rows, 0)
    return set(np.flatnonzero(np.unpackbits(rows[0].numpy().view(np.uint8), bitorder="little")).tolist())


def takes(matcher: Matcher, tokens: Sequence[int]) -> bool:
    return all(matcher.accept(token) for token in tokens)


@pytest.mark.parametrize("form", [REQUIRED, OPTIONAL])
def test_a_call_begins_with_the_models_own_marker(
    model: tuple[GrammarCompiler, tokenizers.Tokenizer], form: object
) -> None:
    """Or with its letters; the markers that the tag does not write stay out."""
    compiler, tokenizer = model
    ids = {text: tokenizer.token_to_id(text) for text in (*SPECIALS, "<|im_start|>")}
    call = tokenizer.encode('[TOOL_CALLS]f[ARGS]{"x": 3}').ids
    assert ids["[TOOL_CALLS]"] in call
    assert ids["[ARGS]"] in call
    matcher = matcher_of(compiler, spec(form))
    first = allowed(matcher)
    assert ids["[TOOL_CALLS]"] in first
    assert not first & {ids["</think>"], ids[SPECIALS[3]], ids["<|im_start|>"]}
    assert takes(matcher, call)
    assert END in allowed(matcher)
    letters = tokenizer.encode("[").ids + tokenizer.encode("TOOL").ids + tokenizer.encode("_CALLS").ids
    assert takes(matcher_of(compiler, spec(form)), letters)


def test_thinking_ends_with_the_models_own_marker(
    model: tuple[GrammarCompiler, tokenizers.Tokenizer],
) -> None:
    """Behind it, the schema holds."""
    compiler, tokenizer = model
    matcher = matcher_of(compiler, spec(THINKING))
    assert takes(matcher, tokenizer.encode("Hm.</think>").ids)
    after = allowed(matcher)
    assert tokenizer.encode("a").ids[0] not in after
    assert tokenizer.token_to_id("</think>") not in after
    assert takes(matcher, [*tokenizer.encode("12").ids, END])


def test_texts_beyond_ascii_are_markers_too(model: tuple[GrammarCompiler, tokenizers.Tokenizer]) -> None:
    compiler, tokenizer = model
    matcher = matcher_of(compiler, spec({"type": "const_string", "value": f"{SPECIALS[3]}f"}))
    marker = tokenizer.token_to_id(SPECIALS[3])
    assert marker is not None
    assert takes(matcher, [marker, tokenizer.encode("f").ids[0], END])


@pytest.mark.parametrize("by_text", [True, False])
def test_tokens_are_named_by_text_or_number(
    model: tuple[GrammarCompiler, tokenizers.Tokenizer], *, by_text: bool
) -> None:
    """Special ones among them; then their letters will not do. Others are told to be no tokens."""
    compiler, tokenizer = model
    ends, letter = tokenizer.token_to_id("</think>"), tokenizer.encode("f").ids[0]
    assert ends is not None
    thoughts = {"type": "any_tokens", "exclude_tokens": ["</think>" if by_text else ends]}
    tag = {"type": "tag", "begin": {"type": "token", "token": "f" if by_text else letter}, "content": thoughts,
           "end": {"type": "token", "token": "</think>" if by_text else ends}}  # fmt: skip
    matcher = matcher_of(compiler, spec(tag))
    assert allowed(matcher) == {letter}
    assert takes(matcher, [letter, *tokenizer.encode("</").ids])
    assert takes(matcher, [ends, END])
    with pytest.raises(InvalidArgument, match="names the token 'no such'"):
        compiler.submit(spec({"type": "token", "token": "no such"})).result()


def test_nothing_else_changes(model: tuple[GrammarCompiler, tokenizers.Tokenizer]) -> None:
    """A grammar that writes a marker's text in another way allows no special token; a tag allows as much of the rest as without markers."""
    compiler, tokenizer = model
    specials = {tokenizer.token_to_id(text) for text in SPECIALS}
    assert not allowed(matcher_of(compiler, Spec("regex", r"\[TOOL_CALLS\].*"))) & specials
    assert not allowed(matcher_of(compiler, Spec("json_schema", '{"const": "[ARGS]"}'))) & specials
    plain = GrammarCompiler(SMOLLM2, SIZE, [END])
    try:
        for form in (REQUIRED, OPTIONAL, THINKING):
            with_markers = allowed(matcher_of(compiler, spec(form)))
            assert with_markers - specials == allowed(matcher_of(plain, spec(form)))
    finally:
        plain.close()


def test_only_what_a_tag_writes_is_a_marker() -> None:
    """Not what it describes, or excludes."""
    ids = {text: index for index, text in enumerate(SPECIALS)}
    assert markers_in(CALL, ids) == {"[TOOL_CALLS]": 0, "[ARGS]": 1}
    assert markers_in(THINKING, ids) == {"</think>": 2}
    excluded = {"type": "any_text", "excludes": ["</think>"]}
    described = {"type": "json_schema", "json_schema": {"const": {"value": "[ARGS]", "begin": "[ARGS]"}}}
    assert markers_in({"type": "sequence", "elements": [excluded, described]}, ids) == {}
    rules = {"type": "dispatch", "rules": [["[ARGS]", described]]}
    assert markers_in(rules, ids) == {"[ARGS]": 1}


def test_white_space_within_a_tag_is_bounded(model: tuple[GrammarCompiler, tokenizers.Tokenizer]) -> None:
    """As in a schema by itself."""
    compiler, tokenizer = model
    for spaces, taken in ((8, True), (9, False), (500, False)):
        matcher = matcher_of(compiler, spec(REQUIRED))
        text = "[TOOL_CALLS]f[ARGS]{" + " " * spaces + '"x": 3}'
        assert takes(matcher, tokenizer.encode(text).ids) is taken


def test_vocabularies_of_tags_are_counted(model: tuple[GrammarCompiler, tokenizers.Tokenizer]) -> None:
    """One that several grammars have is counted once, and goes with the last of them."""
    folder = model[0]._folder
    compiler = GrammarCompiler(folder, SIZE, [END], CompilerLimits(cache=6_000_000))
    try:
        sizes = []
        for begin in ("</think>", "</think>!", "[ARGS]", SPECIALS[3]):
            tag = {"type": "tag", "begin": begin, "content": {"type": "regex", "pattern": "[ab]"}, "end": ""}
            compiler.submit(spec(tag)).result()
            sizes.append(compiler.cached_bytes)
        vocabulary = SIZE * 80
        assert sizes[0] > vocabulary
        assert sizes[1] < sizes[0] + vocabulary // 10
        gc.collect()
        assert compiler.cached_bytes < 2 * vocabulary
    finally:
        compiler.close()
