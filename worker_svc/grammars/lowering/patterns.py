r"""Replaces expressions inside a finished xgrammar grammar by grammar rules.

xgrammar 0.2.8 builds an automaton for the expression of a JSON string and gets two cases wrong. An optional
or repeated group whose end can repeat (`([A-Z][a-z]*)?`) may be entered at its end. Alternatives with a
common start are merged although one of them is also reached otherwise (`a|a{1,2}|bb`). Both need a group or
alternatives. For a standalone expression, xgrammar builds rules instead, and those match correctly. So this
module reads the grammar of a schema as text and replaces each expression that is not flat by the rules of the
standalone expression.
"""

import re
from typing import Any, Final

from worker_svc.grammars.lowering.regex import is_flat

# Matches literals and classes whole, so that nothing inside them is taken for an expression or a name.
_PIECES: Final = re.compile(
    r"""(?P<expression>Regex\("(?P<text>(?:\\.|[^"\\])*)",[ ]json_string=(?:true|false)\))
      | "(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\]
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


def patterns_to_rules(core: Any, grammar: Any) -> Any:
    """Returns `grammar` with rules in place of the expressions that xgrammar would match incorrectly.

    Args:
        core: xgrammar's compiled module.
        grammar: one of its grammars.
    """
    text = str(grammar.to_string())
    prefix = "pattern"
    while prefix in text:
        prefix += "_"
    names: dict[str, str] = {}

    def rule_name(piece: re.Match[str]) -> str:
        if piece["expression"] is None:
            return piece.group()
        expression = _ESCAPED.sub(r"\1", piece["text"])  # lower_regex writes printable ASCII only
        if is_flat(expression):
            return piece.group()
        return names.setdefault(expression, f"{prefix}{len(names)}")

    rules = [_PIECES.sub(rule_name, text)]
    if not names:
        return grammar
    for expression, name in names.items():
        rules.append(_rename_root(str(core.Grammar.from_regex(expression, False).to_string()), name))
    return core.Grammar.from_ebnf("\n".join(rules), "root")


def _rename_root(rules: str, name: str) -> str:
    """Renames the rules `root` and `root_…` of an expression to `name` and `name_…`."""

    def renamed(piece: re.Match[str]) -> str:
        return name + piece["name"].removeprefix("root") if piece["name"] else piece.group()

    return _PIECES.sub(renamed, rules)
