"""The command line of `vllm bench serve` as `triptych bench` reads it."""

import pytest

from deploy.client_commands.bench_flags import extra_fields, read

CHATS = "/v1/chat/completions"
PREFIXES = "--dataset-name prefix_repetition"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"backend": "openai", "endpoint": "/v1/completions", "chat": False, "url": None}),
        ("--backend vllm", {"backend": "vllm", "endpoint": "/v1/completions"}),
        ("--backend openai-chat", {"chat": True, "endpoint": CHATS}),
        (f"--endpoint {CHATS}", {"backend": "openai-chat", "chat": True}),
        ("--host h --port 9", {"url": "http://h:9"}),
        ("--port 9", {"url": "http://127.0.0.1:9"}),
        ("--host ::1", {"url": "http://[::1]:8000"}),
        ("--base-url http://x --host h", {"url": "http://x"}),
        ("--model m --served-model-name s", {"model_name": "s"}),
        ("--input-len 7 --output-len 8", {"random_input_len": 7, "sharegpt_output_len": 8}),
        ("--metric-percentiles 50,99.0", {"metric_percentiles": ("50", "99")}),
        ("--disable-tqdm", {"notes": ["--disable-tqdm has no effect: there is no progress bar"]}),
    ],
)
def test_flags_of_vllm(flags: str, expected: dict[str, object]) -> None:
    """They mean what they mean there."""
    arguments = read(flags.split())
    assert {name: getattr(arguments, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("", {"ignore_eos": True}),
        ("--backend openai-chat", {"ignore_eos": True}),
        ('--extra-body {"ignore_eos":false}', {"ignore_eos": False}),
        ("--dataset-name sharegpt --ignore-eos", {"ignore_eos": True}),
        (f"{PREFIXES} --temperature 0 --top-k 5", {"temperature": 0, "top_k": 5}),
        (f"{PREFIXES} --logprobs 2", {"logprobs": 2}),
        (f"{PREFIXES} --backend openai-chat --logprobs 2", {"logprobs": True, "top_logprobs": 2}),
        (PREFIXES + ' --chat-template-kwargs {"a":1}', {"chat_template_kwargs": {"a": 1}}),
        (PREFIXES + ' --top-p 0.5 --extra-body {"top_p":1,"x":2}', {"top_p": 1, "x": 2}),
    ],
)
def test_fields_of_requests(flags: str, fields: dict[str, object]) -> None:
    """Flags become fields, --extra-body comes before them, and answers to random tokens do not end early."""
    assert extra_fields(read(flags.split())) == fields


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--backend openai --endpoint " + CHATS, "takes chats; use --backend openai-chat"),
        ("--backend openai-chat --endpoint /v1/completions", "change --endpoint or --backend"),
        ("--backend tgi", "invalid choice: 'tgi'"),
        ("--endpoint v1/completions", "--endpoint is a path"),
        ("--insecure", "--insecure is not served; use --ca-file"),
        ("--ramp-up-strategy linear", "run once for each --request-rate"),
        ("--goodput itl:5", "must be ttft:MS, tpot:MS or e2el:MS"),
        ("--percentile-metrics ttft,x", "must hold names of ttft, tpot, itl, e2el"),
        ("--metric-percentiles 101", "must hold numbers from 0 to 100"),
        ("--num-warmups -1", "--num-warmups: must be a whole number from 0"),
        ("--random-prefix-len -1", "--random-prefix-len: must be a whole number from 0"),
        ("--random-range-ratio 1", "must be a number from 0 to below 1"),
        ("--json a --save-result", "both name a file"),
    ],
)
def test_what_cannot_be_done_is_one_line(flags: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, and what to use instead."""
    with pytest.raises(SystemExit) as stopped:
        read(flags.split())
    printed = capsys.readouterr().err
    assert (stopped.value.code, printed.count("\n")) == (2, 1)
    assert error in printed
