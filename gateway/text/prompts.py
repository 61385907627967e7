"""Prefixes of an embedding model's texts: the prompts of Sentence Transformers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.quoting import clip
from protos.errors import InvalidArgument

FILE = "config_sentence_transformers.json"

# The names of the prompts for both sides of a search, in the order that Sentence Transformers documents.
_QUERY: Final = "query"
_DOCUMENT: Final = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """The prompts of a model."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    """In front of every text unless a request says otherwise."""

    @property
    def query(self) -> str:
        """In front of a text that others are compared with."""
        return self._side((_QUERY,))

    @property
    def document(self) -> str:
        """In front of a text that may answer a query."""
        return self._side(_DOCUMENT)

    def _side(self, names: Iterable[str]) -> str:
        """Returns the first prompt of these names; the default only if neither side has a prompt."""
        if self.by_name.keys().isdisjoint((_QUERY, *_DOCUMENT)):
            return self.default
        return next((self.by_name[name] for name in names if name in self.by_name), "")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "TextPrompts":
        """Reads the contents of ``FILE``; an empty mapping if the model has none."""
        found = config.get("prompts")
        names = found if isinstance(found, dict) else {}
        prompts = {name: text for name, text in names.items() if isinstance(text, str)}
        return cls(prompts, prompts.get(str(config.get("default_prompt_name")), ""))

    def choose(self, name: str | None, text: str | None) -> str:
        """Returns the prompt of a request, by name or its own.

        Raises:
            InvalidArgument: if the model has no prompt of that name; lists its prompts.
        """
        if name is None:
            return self.default if text is None else text
        if name not in self.by_name:
            known = ", ".join(f"'{clip(each)}'" for each in self.by_name)
            advice = f"it has {known}" if known else "it has none; send the text as 'prompt'"
            raise InvalidArgument(
                f"the model has no prompt called '{clip(name)}': {advice}", param="prompt_name"
            )
        return self.by_name[name]
