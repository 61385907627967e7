"""Incremental detokenization and stop strings."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.text.detokenizer import BytewiseDetokenizer, DetokenizerFactory, WindowedDetokenizer
from gateway.text.tokenization import TextCodec
from tests.support.gateway.serving import smollm2_folder

UNKNOWN = "<unk>"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(smollm2_folder())


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Returns a small tokenizer in the style of Gemma and Llama 2.

    ▁ for word boundaries, byte fallback for the rest.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=[UNKNOWN, "<s>"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3], trainer)
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(described))


def pieces(detokenizer: object, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]  # type: ignore[attr-defined]


def test_byte_level_tokenizers_take_the_fast_path(codec: TextCodec) -> None:
    assert isinstance(codec.detokenizers.make(skip_special_tokens=True), BytewiseDetokenizer)


def test_ids_beyond_the_vocabulary_have_no_text(codec: TextCodec) -> None:
    """A model's vocabulary may be padded beyond the tokenizer's."""
    assert "".join(pieces(codec.detokenizers.make(skip_special_tokens=True), [10**6])) == ""


def test_every_token_alone_decodes_as_the_library_decodes_it(codec: TextCodec) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    wrong = [
        i for i in range(tokenizer.get_vocab_size())
        if codec.decode([i]) != tokenizer.decode([i], skip_special_tokens=False)
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("text", ["the quick fox", "the 🦊 jumps", " over", "日本 the", "é"])
def test_byte_fallback_joins_bytes_to_characters(sentencepiece: Tokenizer, text: str) -> None:
    factory = DetokenizerFactory(sentencepiece)
    assert isinstance(factory.make(skip_special_tokens=True), BytewiseDetokenizer)
    ids = sentencepiece.encode(text).ids
    parts = pieces(factory.make(skip_special_tokens=True), ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_other_decoders_use_a_window() -> None:
    """Word pieces depend on their neighbours, and their deltas still add up."""
    tokenizer = Tokenizer(
        models.WordPiece({UNKNOWN: 0, "play": 1, "##ing": 2, "now": 3, "!": 4}, unk_token=UNKNOWN)
    )
    tokenizer.decoder = decoders.WordPiece()
    factory = DetokenizerFactory(tokenizer)
    assert isinstance(factory.make(skip_special_tokens=True), WindowedDetokenizer)
    ids = [1, 2, 3, 4]
    parts = pieces(factory.make(skip_special_tokens=True, prompt=[3]), ids)
    assert "".join(parts) == " playing now!"
    assert parts[0] == " play"


def test_a_window_flushes_real_replacement_characters() -> None:
    words = {1: "a", 2: "\ufffd"}
    detokenizer = WindowedDetokenizer(lambda ids: "".join(words[i] for i in ids), [])
    assert detokenizer.push([1]) == "a"
    assert detokenizer.push([2]) == ""
    assert detokenizer.finish() == "\ufffd"
