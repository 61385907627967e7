"""Encoding of long texts beside other threads."""

import threading
import time

import pytest
from tokenizers import Tokenizer

from gateway.text.tokenization import token_ids
from tests.support.gateway.serving import smollm2_folder

LONG = "A long text, with <|im_start|> in it — ünïcode, too. " * 3000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))


@pytest.mark.parametrize("text", ["", "short", LONG])
@pytest.mark.parametrize("special", [True, False])
def test_all_lengths_have_the_librarys_tokens(tokenizer: Tokenizer, text: str, special: bool) -> None:
    """The two ways to encode give the same."""
    expected = tokenizer.encode(text, add_special_tokens=special).ids
    assert token_ids(tokenizer, text, add_special_tokens=special) == expected


def test_other_threads_go_on(tokenizer: Tokenizer) -> None:
    """While one thread encodes a long text, this one runs at least ten times a second of processor time."""
    begin, done = threading.Event(), threading.Event()

    def encode() -> None:
        begin.wait()
        token_ids(tokenizer, LONG * 4, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    time.sleep(0.01)
    began = time.monotonic()
    begin.set()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    took = time.monotonic() - began
    thread.join()
    assert turns > 10 * took
