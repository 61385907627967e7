"""Texts have the embeddings and scores that sentence-transformers gives them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from gateway.pooling.call import Cuts, PoolInput, encode_pair, encode_text
from gateway.text.tokenization import TextCodec
from protos.steps import PoolShape
from tests.support.pooling import tiny_classifiers, tiny_embedders
from tests.support.pooling.in_process import load_model, make_runner, pool
from worker_svc.model_files.loader import fetch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

SHAPE = PoolShape(48, 4)
TOLERANCE = 1e-3
SENTENCES = [
    "Berlin has 3.7 million inhabitants.",
    "?",
    "Ünïcödé wörds, and 日本語 as well",
    "a cat sleeps while the quick brown fox jumps over seven lazy dogs",
    "while seven wise owls read long books about rivers and stars, " * 8,
]
# A word of the tiny models' tokenizers is a token.
WORDS = ["w9 w30", "w5 w6 w7", "w41", "w12 w13 w14 w15 w16 w17 w18 w19 w20"]


def write_tokenizer(folder: Path, *special: str) -> None:
    """Saves a tokenizer of words, which puts the second and the third special token around texts."""
    words = [*special, *(f"w{index}" for index in range(len(special), tiny_embedders.VOCAB_SIZE))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names: dict[str, Any] = {"pad_token": special[0]}
    if len(special) > 1:
        first, last = special[1:]
        tokenizer.post_processor = processors.BertProcessing((last, 2), (first, 1))
        names |= {"cls_token": first, "sep_token": last}
        names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def pooled(folder: Path, inputs: Sequence[PoolInput], shape: PoolShape = SHAPE) -> torch.Tensor:
    """Returns what our worker makes of inputs, [inputs, values]."""
    runner = make_runner(load_model(folder), shape)
    second = [each.second_text_at for each in inputs]
    return torch.stack(pool(runner, shape, [each.token_ids for each in inputs], second=second))


def encoder_of(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < TOLERANCE


def test_minilm() -> None:
    folder = fetch("minilm")
    tokenizer = TextCodec.load(folder).tokenizer
    inputs = [encode_text(tokenizer, text, Cuts()) for text in SENTENCES]
    found = pooled(folder, inputs, PoolShape(256, len(inputs)))
    wanted = encoder_of(folder).encode(SENTENCES, convert_to_tensor=True)
    assert_close(found, wanted)
    from sentence_transformers.util import cos_sim

    assert_close(found @ found.T, cos_sim(wanted, wanted))


def test_a_cross_encoder(tmp_path: Path) -> None:
    """Scores of pairs, whose texts the model tells apart by token types."""
    from sentence_transformers import CrossEncoder

    tiny_classifiers.write("bert-pairs", tmp_path)
    write_tokenizer(tmp_path, "[PAD]", "[CLS]", "[SEP]")
    tokenizer = TextCodec.load(tmp_path).tokenizer
    pairs = [(WORDS[0], text) for text in WORDS]
    found = pooled(tmp_path, [encode_pair(tokenizer, *pair, Cuts()) for pair in pairs])
    wanted = CrossEncoder(str(tmp_path), device="cpu").predict(pairs, convert_to_tensor=True)
    assert_close(found[:, 0], wanted)
    assert wanted.std() > 10 * TOLERANCE


def test_a_causal_embedder_with_prompts(tmp_path: Path) -> None:
    """The last token's vector, with a prompt by name, with one word for word, and for searches."""
    tiny_embedders.write("causal", tmp_path)
    write_tokenizer(tmp_path, "[PAD]")
    prompts = {"prompts": {"query": "w80 w81 ", "document": "w82 "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    text = TextCodec.load(tmp_path)
    encoder = encoder_of(tmp_path)
    plain = encoder.encode(WORDS, prompt_name="document", convert_to_tensor=True)
    for name, prompt in ((None, None), ("document", None), (None, "w70 w71 ")):
        chosen = text.prompts.choose(name, prompt)
        found = pooled(tmp_path, [encode_text(text.tokenizer, chosen + each, Cuts()) for each in WORDS])
        wanted = encoder.encode(WORDS, prompt_name=name, prompt=prompt, convert_to_tensor=True)
        assert_close(found, wanted)
        assert name == "document" or (wanted - plain).abs().max() > 10 * TOLERANCE
    for prompt, encode in (
        (text.prompts.query, encoder.encode_query),
        (text.prompts.document, encoder.encode_document),
    ):
        found = pooled(tmp_path, [encode_text(text.tokenizer, prompt + each, Cuts()) for each in WORDS])
        assert_close(found, encode(WORDS, convert_to_tensor=True))
