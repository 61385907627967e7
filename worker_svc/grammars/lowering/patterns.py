r"""Expressions in JSON strings, as rules of a grammar.

For the expression of a JSON string xgrammar 0.2.8 builds an automaton, and gets it wrong in two ways: an optional or repeated group whose end
can go on by itself (``([A-Z][a-z]*)?``) may be entered at its end, and alternatives that begin alike are merged although one of them is
also reached otherwise (``a|a{1,2}|bb``). Both need a group or alternatives. It makes rules of the expressions that it is given by themselves,
and matches those as it should. So its grammar of a schema is read, and each expression that is not flat replaced by its rules.
"""

import re
from typing import Any, Final

from worker_svc.grammars.lowering.regex import is_flat

# Literals and classes as wholes, so that nothing within them is taken for anything else.
_PIECES: Final = re.compile(
    r"""(?P<expression>Regex\("(?P<text>(?:\\.|[^"\\])*)",[ ]json_string=(?:true|false)\))
      | "(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\]
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


def with_rules(core: Any, grammar: Any) -> Any:
    """The same grammar with rules in place of expressions that xgrammar would get wrong.

    Args:
        core: xgrammar's compiled half.
        grammar: one of its grammars.
    """
    text = str(grammar.to_string())
    stem = "pattern"
    while stem in text:
        stem += "_"
    names: dict[str, str] = {}

    def named(piece: re.Match[str]) -> str:
        if piece["expression"] is None:
            return piece.group()
        expression = _ESCAPED.sub(r"\1", piece["text"])  # printable ASCII: see regex.py
        if is_flat(expression):
            return piece.group()
        return names.setdefault(expression, f"{stem}{len(names)}")

    rules = [_PIECES.sub(named, text)]
    if not names:
        return grammar
    for expression, name in names.items():
        rules.append(_renamed(str(core.Grammar.from_regex(expression, False).to_string()), name))
    return core.Grammar.from_ebnf("\n".join(rules), "root")


def _renamed(rules: str, name: str) -> str:
    """The rules of an expression, called ``root`` and ``root_…``, under another name."""

    def renamed(piece: re.Match[str]) -> str:
        return name + piece["name"].removeprefix("root") if piece["name"] else piece.group()

    return _PIECES.sub(renamed, rules)
