"""The chat template of ``--chat-template``, which replaces the model's own."""

from pathlib import Path

import jinja2

from gateway.text.chat_template import ChatTemplate
from protos.errors import ConfigurationRefused

# What Jinja text has and names of files have not.
_JINJA = ("{", "}", "\n")


def read_template(setting: str | None) -> str | None:
    """Returns the text of a template that is given as a file or as the text itself.

    Raises:
        ConfigurationRefused: if there is no such file, or the text is no template.
    """
    if setting is None:
        return None
    source = setting
    if not any(sign in setting for sign in _JINJA):
        try:
            source = Path(setting).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationRefused(
                f"--chat-template {setting}: {reason}; give a file or the template's text"
            ) from error
    try:
        ChatTemplate(source, {})
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationRefused(f"--chat-template, line {error.lineno}: {error.message}") from error
    return source
