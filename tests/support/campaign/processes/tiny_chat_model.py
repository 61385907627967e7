"""A tiny random model with a tokenizer of bytes: it starts quickly, and its texts say exactly its tokens."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support import tiny_models

SPECIAL: Final = ("<pad>", "<s>", "</s>")
END: Final = SPECIAL.index("</s>")
"""The end token."""
FIRST_BYTE: Final = len(SPECIAL)
"""The token of byte 0; the others follow. Three bytes that never occur in UTF-8 have no token."""
PRINTABLE: Final = tuple(FIRST_BYTE + byte for byte in range(ord(" "), ord("~") + 1))
"""Tokens that are one printable character each."""
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)


def write(folder: Path, family: str = "llama") -> Path:
    """Saves a model of a family of `tiny_models` and its tokenizer; returns ``folder``."""
    tiny_models.write(family, folder)
    count = tiny_models.VOCAB_SIZE - FIRST_BYTE
    vocabulary = {name: index for index, name in enumerate(SPECIAL)}
    vocabulary |= {letter: FIRST_BYTE + byte for byte, letter in enumerate(_byte_letters()[:count])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_letters() -> list[str]:
    """The letters that a byte-level vocabulary writes for bytes 0 to 255."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in kept else next(moved)) for byte in range(256)]
