"""Encoding, compared with transformers' tokenizer on the same files."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from gateway.text.tokenization import TextCodec, TextPrompts, TextWorker
from protos.errors import Internal, Overloaded
from tests.support.gateway.serving import smollm2_folder

TEXTS = [
    "Hello world",
    "  spaces  ",
    "日本語",
    "<|im_start|>user\nhi<|im_end|>",
    "a\r\n\tb",
    "🇫🇷é",
    "x" * 5000,
]
LONG = "A long text, with <|im_start|> in it — ünïcode, too. " * 12_000


def copy_with(tmp_path: Path, **config: Any) -> Path:
    target = tmp_path / "model"
    shutil.copytree(smollm2_folder(), target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True, "eos_token": "<|im_end|>"},
        {"add_bos_token": False},
    ],
)
def test_encodes_as_transformers_does(tmp_path: Path, config: dict[str, Any]) -> None:
    """The ids are the same with and without special tokens, whatever the configuration says."""
    from transformers import AutoTokenizer

    folder = copy_with(tmp_path, **config)
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextCodec.load(folder)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(
                text, add_special_tokens=special
            )


def test_bos_comes_from_the_post_processor_and_chats_get_no_second_one(tmp_path: Path) -> None:
    """Completions begin with BOS; a template that writes BOS itself is encoded without special tokens."""
    folder = copy_with(tmp_path)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(path)
    codec = TextCodec.load(folder)
    assert codec.encode("hi", add_special_tokens=True) == [1, *codec.encode("hi", add_special_tokens=False)]
    assert codec.chat_template is not None
    text = codec.chat_template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert codec.encode(text, add_special_tokens=False)[:2] == [1, 9690]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    """The message names a file that cannot be read."""
    folder = copy_with(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(Internal, match=name.replace(".", r"\.")):
        TextCodec.load(folder)


async def test_long_work_leaves_the_event_loop_alone() -> None:
    worker = TextWorker()
    try:
        here = threading.get_ident()
        assert await worker.run(10, threading.get_ident) == here
        assert await worker.run(10**6, threading.get_ident) != here
    finally:
        worker.close()


async def test_long_work_of_requests_is_bounded() -> None:
    """Beyond two threads and what may wait, requests are refused; answers and short work never are."""
    worker, go = TextWorker(max_waiting=1), threading.Event()
    try:
        running = [asyncio.create_task(worker.run(10**6, go.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 of them"):
            await worker.run(10**6, go.wait)
        assert await worker.run(10, lambda: 5) == 5
        answer = asyncio.create_task(worker.finish(10**6, lambda: 6))
        go.set()
        assert await asyncio.gather(*running, answer) == [True, True, True, 6]
        assert await worker.run(10**6, lambda: 7) == 7
    finally:
        worker.close()


async def test_short_work_never_waits_for_long_work() -> None:
    """Texts of a size have threads of their own; short work in a thread is never refused."""
    worker, go = TextWorker(max_waiting=0), threading.Event()
    try:
        stuck = [asyncio.create_task(worker.run(size, go.wait)) for size in (10**4, 10**6) for _ in range(2)]
        await asyncio.sleep(0)
        short = [worker.run(10, threading.get_ident, inline=False) for _ in range(20)]
        assert threading.get_ident() not in await asyncio.gather(*short)
        with pytest.raises(Overloaded):
            await worker.run(10**4, go.wait)
        go.set()
        assert all(await asyncio.gather(*stuck))
    finally:
        go.set()
        worker.close()


def test_other_threads_go_on() -> None:
    """While one thread encodes a long text, this one runs at least ten times a second of processor time."""
    codec = TextCodec.load(smollm2_folder())
    begin, done = threading.Event(), threading.Event()

    def encode() -> None:
        begin.wait()
        codec.encode(LONG, add_special_tokens=False)
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


@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        ({"query": "q: ", "document": "d: ", "passage": "p: "}, None, "q: ", "d: "),
        ({"query": "q: ", "passage": "p: "}, "query", "q: ", "p: "),
        ({"corpus": "c: "}, None, "", "c: "),
        ({"query": "q: "}, "query", "q: ", ""),
        ({"similar": "s: "}, "similar", "s: ", "s: "),
        ({"similar": "s: "}, None, "", ""),
        ({}, None, "", ""),
    ],
)
def test_each_side_of_a_search_has_its_prompt(
    prompts: dict[str, str], default: str | None, query: str, document: str
) -> None:
    """The first of its names counts; the default prompt serves if neither side has one."""
    found = TextPrompts.read({"prompts": prompts, "default_prompt_name": default})
    assert (found.query, found.document) == (query, document)
