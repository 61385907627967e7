"""SmolLM2 at temperature 1 under schemas, expressions and grammars: every finished output matches.

TRIPTYCH_STRUCTURED_FULL=1 runs all 300 schemas, 50 expressions and 20 grammars instead of a sample.
"""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from protos.errors import InvalidArgument
from tests.support.sampling_params import constrained, sampling_params
from tests.support.worker.grammar_harness import END, ConstrainedHarness, compiler, text_of, tokenizer
from tests.support.worker.structured_cases import GRAMMARS, REGEXES, schema
from worker_svc.grammars.spec import Spec

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3000 if os.environ.get("TRIPTYCH_STRUCTURED_FULL") else 120),
]
FULL = os.environ.get("TRIPTYCH_STRUCTURED_FULL") == "1"
CHECKER = Draft202012Validator.FORMAT_CHECKER
SCHEMAS = range(300) if FULL else range(0, 300, 10)
CHOSEN_REGEXES = REGEXES if FULL else REGEXES[::5]
CHOSEN_GRAMMARS = GRAMMARS if FULL else GRAMMARS[::4]


@pytest.fixture(scope="module")
def harness() -> ConstrainedHarness:
    """A harness in float32, where kernels of different batch sizes hardly ever disagree about a token."""
    return ConstrainedHarness(dtype="float32")


def outputs(
    harness: ConstrainedHarness, specs: Sequence[Spec], prompt: str, max_tokens: int, **options: Any
) -> list[tuple[str, bool]]:
    """Returns each request's text and whether it finished; runs batches of up to 32."""
    results = []
    for start in range(0, len(specs), 32):
        some = specs[start : start + 32]
        sampling = [
            sampling_params(temperature=1.0, seed=start + index, **options) for index in range(len(some))
        ]
        generated = harness.generate_constrained([prompt] * len(some), some, sampling, max_tokens)
        for spec, (tokens, error) in zip(some, generated, strict=True):
            assert error is None, (spec, error, text_of(tokens))
            results.append((text_of(tokens), END in tokens))
    return results


@pytest.mark.slow
def test_every_finished_json_is_valid(harness: ConstrainedHarness) -> None:
    """Outputs match schemas with nesting, enums, references, patterns, formats, unions and bounds."""
    schemas = [schema(number) for number in SCHEMAS]
    specs = [Spec("json_schema", json.dumps(each)) for each in schemas]
    finished = 0
    for each, (text, done) in zip(
        schemas, outputs(harness, specs, "A short example in JSON:\n", 200), strict=True
    ):
        if done:
            finished += 1
            Draft202012Validator(each, format_checker=CHECKER).validate(json.loads(text))
    assert finished > len(schemas) * 0.6


def test_filters_see_the_mask_first(harness: ConstrainedHarness) -> None:
    """Outputs also match with top_p, top_k and min_p, which filter after the mask."""
    each = schema(0)
    specs = [Spec("json_schema", json.dumps(each))] * 3
    results = outputs(harness, specs, "JSON:\n", 80, top_p=0.8, top_k=20, min_p=0.05)
    for text, done in results:
        if done:
            Draft202012Validator(each, format_checker=CHECKER).validate(json.loads(text))


def test_any_object_is_an_object(harness: ConstrainedHarness) -> None:
    for text, done in outputs(harness, [Spec("json_object")] * 2, "A short JSON object:\n", 60):
        assert text.lstrip().startswith("{")
        if done:
            assert isinstance(json.loads(text), dict)


def test_every_finished_text_matches_its_expression(harness: ConstrainedHarness) -> None:
    specs = [Spec("regex", regex) for regex in CHOSEN_REGEXES]
    results = outputs(harness, specs, "For example: ", 60)
    for regex, (text, done) in zip(CHOSEN_REGEXES, results, strict=True):
        if done:
            assert re.fullmatch(regex, text), (regex, text)
    assert sum(done for _, done in results) > len(results) * 0.6


@pytest.mark.slow
def test_every_finished_text_follows_its_grammar(harness: ConstrainedHarness) -> None:
    specs = [Spec("grammar", grammar) for grammar, _ in CHOSEN_GRAMMARS]
    results = outputs(harness, specs, "For example: ", 80)
    for (grammar, check), (text, done) in zip(CHOSEN_GRAMMARS, results, strict=True):
        if done:
            assert check(text), (grammar, text)
    assert sum(done for _, done in results) > len(results) * 0.6


def test_choices_and_tags(harness: ConstrainedHarness) -> None:
    values = ["positive", 'a "quoted" one', "日本語"]
    tag = {"type": "structural_tag", "format": {
        "type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "</call>"}}  # fmt: skip
    choice, tagged = outputs(
        harness, [Spec("choice", json.dumps(values)), Spec("structural_tag", json.dumps(tag))], "It is ", 40
    )
    assert choice[0] in values
    assert re.fullmatch(r"<call>[12]</call>", tagged[0])


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch_or_on_jumps(harness: ConstrainedHarness) -> None:
    spec = Spec("json_schema", json.dumps(schema(1)))
    rare = Spec("choice", json.dumps(["𒀀𒀁𒀂𒀃🙂", "𒀀𒀁𒀂𒀃🙃"]))
    sampling = [
        sampling_params(temperature=1.0, seed=5),
        sampling_params(temperature=1.0, seed=6),
        sampling_params(temperature=1.0, seed=7),
    ]
    specs = [spec, None, rare]
    together = harness.generate_constrained(["JSON: ", "Once", "A: "], specs, sampling, 100)
    alone = harness.generate_constrained(["JSON: "], [spec], sampling[:1], 100)
    assert alone[0] == together[0]
    chunks, decodes = harness.num_chunks, harness.num_decodes
    (jumping,) = harness.generate_constrained(["A: "], [rare], sampling[2:], 100)
    passes = harness.num_chunks + harness.num_decodes - chunks - decodes
    assert jumping == together[2]
    assert passes < len(jumping[0]) - 4
    harness.constraints._min_jump = 0
    (stepping,) = harness.generate_constrained(["A: "], [rare], sampling[2:], 100)
    harness.constraints._min_jump = 4
    assert stepping == jumping


def test_grammars_and_other_parameters_hold_together(harness: ConstrainedHarness) -> None:
    """Penalties, biases, bans and min_tokens work with a grammar and do not affect requests without one."""
    letters, digits = Spec("regex", "[ab]{10}"), Spec("regex", "[0-9]{12}")
    comma = tokenizer().encode(",").ids[0]
    plain = sampling_params(temperature=1.0, seed=4, frequency_penalty=1.0, logit_bias={comma: -100.0})
    sampling = [
        sampling_params(temperature=1.0, seed=1, presence_penalty=1.5, frequency_penalty=1.5, min_tokens=40),
        plain,
        sampling_params(temperature=0.0, repetition_penalty=1.3, bad_words=(tokenizer().encode("12").ids,)),
    ]
    results = harness.generate_constrained(
        ["Letters: ", "Once upon a time", "Digits: "], [letters, None, digits], sampling, 40
    )
    texts = [text_of(tokens) for tokens, _ in results]
    assert all(error is None for _, error in results)
    assert re.fullmatch("[ab]{10}", texts[0])
    assert re.fullmatch("[0-9]{12}", texts[2])
    assert comma not in results[1][0]
    assert harness.generate_constrained(["Once upon a time"], [None], [plain], 40) == [results[1]]


def test_a_resumed_request_continues_its_grammar(harness: ConstrainedHarness) -> None:
    """After a preemption the matcher replays the output so far and constrains the rest."""
    from protos.steps import Prefill

    spec = Spec("regex", "[a-z]{40}")
    compiler().submit(spec).result()
    sampling = sampling_params(temperature=1.0, seed=11)
    ((tokens, _),) = harness.generate_constrained(["word: "], [spec], [sampling], 60)
    prompt = [5, 6, 7]
    sampling = constrained(sampling, "regex", "[a-z]{40}")
    again = harness.admit(0, prompt + tokens[:9], sampling, num_prompt_tokens=3)
    (output,) = harness.run(admit=[again], work=Prefill(0, 0, 12, sample=True))
    assert output.error is None
    allowed = text_of([*tokens[:9], *output.token_ids])
    assert re.fullmatch("[a-z]{1,40}", allowed)
    harness.release([0])
    wrong = harness.admit(0, [*prompt, 5, 6], sampling, num_prompt_tokens=3)
    (output,) = harness.run(admit=[wrong], work=Prefill(0, 0, 5, sample=True))
    assert isinstance(output.error, InvalidArgument)
    harness.release([])
