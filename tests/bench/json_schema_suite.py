"""Counts right answers by the official JSON Schema test suite, for Triptych and for llguidance alone.

``python -m tests.bench.json_schema_suite [--quick] [--failures]`` compiles every schema of the suite (draft
2020-12, in ``tests/bench/data/json_schema_suite``, with its licence) and matches every instance, written as
compact JSON and cut into SmolLM2's tokens. Triptych is measured through `GrammarCompiler` and `Matcher`,
llguidance with its defaults. No model runs. The tests in ``optional`` count, except those that
contradict ``format.json`` by making `format` an assertion.

A schema is taken if it is not refused, and served if no invalid instance of it is accepted: an engine that
ignores a keyword takes the schema without serving it. The ratios, for both: schemas served, and
schemas taken, of those with a valid instance in the suite; valid instances of taken schemas accepted; invalid
instances of them rejected. The aims for Triptych are 0.75 served, 0.97 accepted and 1 rejected.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import llguidance
import tokenizers

from protos.errors import InvalidArgument
from tests.bench.support.report import parser, report
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec
from worker_svc.model_files.loader import default_cache_dir

SUITE: Final = Path(__file__).parent / "data" / "json_schema_suite"
MODEL: Final = default_cache_dir() / "smollm2"
VOCAB, END = 49152, 2

Accepts = Callable[[Sequence[int]], bool]
"""Says whether these tokens are a whole answer."""
Compile = Callable[[str], Accepts | None]
"""Returns the answers of a schema; `None` if it is refused."""


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "a third of the schemas")
    options.add_argument("--failures", action="store_true", help="print every wrong answer of Triptych")
    arguments = options.parse_args()
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    groups = list(suite())[:: 3 if arguments.quick else 1]
    compiler = GrammarCompiler(MODEL, VOCAB, [END])
    engines = {"": triptych(compiler), "llguidance_": plain_llguidance()}
    ratios: dict[str, float] = {}
    print(f"{'':>12}{'served':>10}{'taken':>10}{'accepted':>10}{'rejected':>10}")
    for prefix, compile_schema in engines.items():
        found = measure(groups, compile_schema, tokenizer, show=arguments.failures and not prefix)
        ratios |= {f"{prefix}{name}": value for name, value in found.items()}
        print(
            f"{prefix.rstrip('_') or 'triptych':>12}" + "".join(f"{value:10.4f}" for value in found.values())
        )
    compiler.close()
    report("json_schema_suite", {"schemas": len(groups)}, ratios)


def suite() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each schema and its group of tests."""
    for file in [*sorted(SUITE.glob("*.json")), *sorted(SUITE.glob("optional/*.json"))]:
        for group in json.loads(file.read_text()):
            yield f"{file.stem}: {group['description']}", group


def measure(
    groups: Sequence[tuple[str, dict[str, Any]]],
    compile_schema: Compile,
    tokenizer: tokenizers.Tokenizer,
    *,
    show: bool,
) -> dict[str, float]:
    """Returns the shares of schemas served and taken, valid instances accepted and invalid ones rejected."""
    satisfiable = served = taken = 0
    right = {True: 0, False: 0}
    total = {True: 0, False: 0}
    for name, group in groups:
        has_value = any(test["valid"] for test in group["tests"])
        satisfiable += has_value
        accepts = compile_schema(json.dumps(group["schema"]))
        if accepts is None:
            if show and has_value:
                print("refused", name)
            continue
        taken += has_value
        kept = True
        for test in group["tests"]:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            accepted = accepts(tokenizer.encode(text).ids)
            total[test["valid"]] += 1
            right[test["valid"]] += accepted == test["valid"]
            kept &= test["valid"] or not accepted
            if show and accepted != test["valid"]:
                print("accepted" if accepted else "rejected", name, "|", test["description"], text[:80])
        served += has_value and kept
    return {
        "schemas_served": served / satisfiable,
        "schemas_taken": taken / satisfiable,
        "valid_accepted": right[True] / total[True],
        "invalid_rejected": right[False] / total[False],
    }


def triptych(compiler: GrammarCompiler) -> Compile:
    """Returns the product's own way from a schema to a matcher."""

    def compiled(schema: str) -> Accepts | None:
        spec = Spec("json_schema", schema)
        try:
            compiler.submit(spec).result()
        except InvalidArgument:
            return None
        grammar = compiler.find(spec)
        assert grammar is not None
        # Every instance starts at the beginning, as a request does.
        return lambda tokens: all(map(Matcher(grammar, [END], []).accept, [*tokens, END]))

    return compiled


def plain_llguidance() -> Compile:
    """Returns llguidance's compiler of schemas."""
    vocabulary = llguidance.LLTokenizer(str(MODEL / "tokenizer.json"), n_vocab=VOCAB, eos_token=END)

    def compiled(schema: str) -> Accepts | None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        template = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        if template.is_error():
            return None

        def accepts(tokens: Sequence[int]) -> bool:
            matcher = template.deep_copy()
            return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

        return accepts

    return compiled


if __name__ == "__main__":
    main()
