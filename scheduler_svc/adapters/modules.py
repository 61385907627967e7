"""The syntax of LoRA adapters in settings."""

import json
import re
from typing import Final

_MODULE: Final = re.compile(r"[^\s,]+")
_SEPARATORS: Final = " \t\n,"


def split_modules(text: str) -> tuple[str, ...]:
    """Splits a setting: ``name=path`` or JSON objects, separated by commas or spaces.

    Returns:
        Each adapter as ``name=path``, or as a JSON object if its name or path contains a separator. Joined
        with commas, they form the setting again.

    Raises:
        ValueError: a part is neither.
    """
    modules, position = [], 0
    while position < len(text):
        if text[position] in _SEPARATORS:
            position += 1
        elif text[position] == "{":
            module, position = json.JSONDecoder().raw_decode(text, position)
            name, path = module.get("name"), module.get("path")
            if not (isinstance(name, str) and isinstance(path, str)):
                raise ValueError('expected JSON objects with "name" and "path"')
            plain = f"{name}={path}"
            fits = _MODULE.fullmatch(plain) and "=" not in name and not name.startswith("{")
            modules.append(plain if fits else json.dumps({"name": name, "path": path}))
        else:
            part = _MODULE.match(text, position)
            assert part is not None
            modules.append(part[0])
            position = part.end()
    return tuple(modules)


def name_and_path(module: str) -> tuple[str, str]:
    """Returns the name and the path of a part from :func:`split_modules`.

    Raises:
        ValueError: either is missing.
    """
    if module.startswith("{"):
        parts = json.loads(module)
        name, path = parts["name"], parts["path"]
    else:
        name, _, path = module.partition("=")
    if not (name and path):
        raise ValueError(
            f"expected name=path, for example sql=/adapters/sql, not {module!r}; write a path with spaces or commas"
            ' as JSON: {"name": "sql", "path": "/my adapters/sql"}'
        )
    return name, path
