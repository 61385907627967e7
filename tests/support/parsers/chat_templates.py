"""The formats that the chat templates of well-known models show, from which docs/models.md is made.

``python -m tests.support.parsers.chat_templates`` writes them down anew: for the templates in the wheel of
`trl`, and for those in a folder of llama.cpp's (``models/templates``), if given.
"""

import json
import sys
import zipfile
from pathlib import Path

import jinja2

from gateway.parsers.formats import Format
from gateway.parsers.writing import Call, write
from gateway.text.chat_template import ChatTemplate
from gateway.text.derive import Derived, derive
from tests.support.rbln.wheels import fetch

TRL = ("trl", "1.16.0")
FOUND = Path(__file__).with_suffix(".json")
SPECIAL_TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}


def trl_templates() -> dict[str, str]:
    """Returns the templates in the wheel of `trl`, by name.

    Raises:
        IndexUnreachable: if the wheel is not in the cache and the package index does not answer.
    """
    with zipfile.ZipFile(fetch(*TRL)) as archive:
        paths = [path for path in archive.namelist() if path.endswith(".jinja")]
        return {Path(path).stem: archive.read(path).decode() for path in sorted(paths)}


def formats_of(source: str) -> dict[str, str]:
    """Returns the formats of tool calls and thinking, and the reason why there are no calls."""
    found = derive(ChatTemplate(source, SPECIAL_TOKENS))
    texts = {
        "tools": found.tool_format or (_example(found.tools) if found.tools else ""),
        "thinking": found.thinking_format or _markers(found),
        "reason": found.reason,
    }
    return {kind: text for kind, text in texts.items() if text}


def _example(form: Format) -> str:
    return write(form, [Call("NAME", {"KEY": "VALUE"})])


def _markers(found: Derived) -> str:
    if (form := found.thinking) is None:
        return ""
    begin, end = form.answer[0] if form.answer else ("", "")
    return f"{form.start}…{form.end}{begin}{'…' if begin else ''}{end}"


def main(folders: list[str]) -> None:
    """Writes the file anew; without a folder, llama.cpp's templates keep their rows."""
    rows = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    rows["trl"] = {name: formats_of(source) for name, source in trl_templates().items()}
    for folder in folders:
        sources = {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.jinja"))}
        rows["llama.cpp"] = {name: formats_of(source) for name, source in sources.items()}
    FOUND.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except jinja2.TemplateSyntaxError as error:
        sys.exit(f"a template cannot be compiled: {error}")
