"""Incremental detokenization and stop strings."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.text.detokenizer import BytewiseDetokenizer, DetokenizerFactory, StopStrings, WindowedDetokenizer
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
    """SmolLM2 decodes bytewise."""
    assert isinstance(codec.detokenizers.make(skip_special_tokens=True), BytewiseDetokenizer)


@pytest.mark.parametrize(
    "text",
    ["Paris.", "naïve café", "日本語です", "👩‍👩‍👧‍👦 family", "a\u0301b", "\n\n\t x", "Привет", "🇫🇷", ""],
)
def test_deltas_add_up_and_never_hold_half_a_character(codec: TextCodec, text: str) -> None:
    """Deltas are whole characters and add up to the text."""
    ids = codec.encode(text, add_special_tokens=False)
    parts = pieces(codec.detokenizers.make(skip_special_tokens=True), ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_waits_for_its_bytes(codec: TextCodec) -> None:
    """A character split over tokens appears whole with its last token."""
    ids = codec.encode("𓀀", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = codec.detokenizers.make(skip_special_tokens=True)
    assert [detokenizer.push([i]) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.push([ids[-1]]) == "𓀀"


def test_an_unfinished_character_at_the_end_is_replaced(codec: TextCodec) -> None:
    """A text cut inside a character ends with U+FFFD, like a decode of all tokens."""
    ids = codec.encode("x𓀀", add_special_tokens=False)[:-1]
    parts = pieces(codec.detokenizers.make(skip_special_tokens=True), ids)
    assert "".join(parts[:-1]) == "x"
    assert parts[-1] == "\ufffd"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_on_request(codec: TextCodec, skip: bool) -> None:
    """skip_special_tokens decides whether an end token has text."""
    parts = pieces(codec.detokenizers.make(skip_special_tokens=skip), [2])
    assert "".join(parts) == ("" if skip else "<|im_end|>")


def test_ids_beyond_the_vocabulary_have_no_text(codec: TextCodec) -> None:
    """A model's vocabulary may be padded beyond the tokenizer's."""
    assert "".join(pieces(codec.detokenizers.make(skip_special_tokens=True), [10**6])) == ""


def test_every_token_alone_decodes_as_the_library_decodes_it(codec: TextCodec) -> None:
    """The byte table agrees with the tokenizer on the whole vocabulary."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    wrong = [
        i for i in range(tokenizer.get_vocab_size())
        if codec.decode([i]) != tokenizer.decode([i], skip_special_tokens=False)
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("text", ["the quick fox", "the 🦊 jumps", " over", "日本 the", "é"])
def test_byte_fallback_joins_bytes_to_characters(sentencepiece: Tokenizer, text: str) -> None:
    """Sentencepiece's byte tokens become characters once they are complete."""
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
    """Text that really ends with U+FFFD is emitted at the end."""
    words = {1: "a", 2: "\ufffd"}
    detokenizer = WindowedDetokenizer(lambda ids: "".join(words[i] for i in ids), [])
    assert detokenizer.push([1]) == "a"
    assert detokenizer.push([2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_the_tokenizer_folder_holds_no_weights() -> None:
    """The fixture has exactly the files that a scheduler sends."""
    assert {path.suffix for path in Path(smollm2_folder()).iterdir()} <= {".json", ".jinja"}


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Returns the text emitted per piece (and by the flush, if nothing matched), and the match."""
    watcher = StopStrings(stops, include_in_output=include)
    out = []
    for piece in pieces:
        out.append(watcher.feed(piece))
        if watcher.matched is not None:
            return out, watcher.matched
    return [*out, watcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "emitted", "matched"),
    [
        (["END"], ["abc", "END", "x"], ["abc", ""], "END"),
        (["END"], ["abcE", "N", "D"], ["abc", "", ""], "END"),
        (["END"], ["abcE", "N", "X"], ["abc", "", "ENX", ""], None),
        (["END"], ["abcEN"], ["abc", "EN"], None),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["abc", "b"], ["a", "b"], ["", "a"], "b"),
        (["b", "ab"], ["ab"], [""], "ab"),
        (["x"], ["", "a", ""], ["", "a", "", ""], None),
        (["."], ["Paris.", " More"], ["Paris"], "."),
        (["日本"], ["私は日", "本人"], ["私は", ""], "日本"),
        (["aXb", "X"], ["a", "Xb"], ["", "a"], "X"),
        (["stop", "stopping"], ["stopp"], [""], "stop"),
    ],
)
def test_emits_up_to_the_first_match(
    stops: list[str], pieces: list[str], emitted: list[str], matched: str | None
) -> None:
    """Only text that may still become a stop string is held back."""
    assert run(stops, pieces) == (emitted, matched)


@pytest.mark.parametrize(
    ("pieces", "emitted"), [(["abcEN", "D!"], ["abc", "END"]), (["END"], ["END"]), (["aEND more"], ["aEND"])]
)
def test_the_stop_string_is_part_of_the_output_on_request(pieces: list[str], emitted: list[str]) -> None:
    """include_stop_str_in_output emits the match, and nothing behind it."""
    assert run(["END"], pieces, include=True) == (emitted, "END")
