"""The command line of `vllm bench serve` as `triptych bench` reads it."""

from pathlib import Path

import pytest

from deploy.client_commands.bench_flags import extra_fields, read
from deploy.client_commands.vllm_bench_flags import MOOT, MOOT_SWITCHES, REFUSED

CHATS = "/v1/chat/completions"
OTHER_WORKLOAD = "--hf-output-len has no effect: it belongs to a workload that is not served"
NO_TEMPLATE = "--chat-template-kwargs has no effect: completions have no chat template"
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
        ("--metric-percentiles 99.99999", {"metric_percentiles": ("99.99999",)}),
        ("--num_prompts 5 --result_dir=a_b --save_result", {"num_prompts": 5, "result_dir": Path("a_b")}),
        ("--hf-output-len 0", {"notes": [OTHER_WORKLOAD]}),
        ('--chat-template-kwargs {"a":1}', {"notes": [NO_TEMPLATE]}),
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
        ("--dataset-name sharegpt --dataset-path a --ignore-eos", {"ignore_eos": True}),
        (f"{PREFIXES} --temperature 0 --top-k 5", {"temperature": 0, "top_k": 5}),
        (f"{PREFIXES} --logprobs 2", {"logprobs": 2}),
        (f"{PREFIXES} --backend openai-chat --logprobs 2", {"logprobs": True, "top_logprobs": 2}),
        (PREFIXES + ' --chat-template-kwargs {"a":1}', {}),
        (
            PREFIXES + ' --backend openai-chat --chat-template-kwargs {"a":1}',
            {"chat_template_kwargs": {"a": 1}},
        ),
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
        ("--dataset-name sharegpt", "name one with --dataset-path"),
        (PREFIXES + " --num-prompts 2", "raise --num-prompts"),
        ("--dataset-path a", "--dataset-name random reads no file; omit --dataset-path"),
        ("--result-filename a", "need --save-result"),
        ("--disable-shuffle", "--disable-shuffle is not served; use --seed"),
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing vLLM
def test_every_flag_of_vllm_is_known(shared_vllm: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that vLLM adds, renames or removes shows up, and so does one that takes a value there alone."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    theirs = {name: action for action in parser._actions for name in action.option_strings}
    assert {*MOOT, *MOOT_SWITCHES, *REFUSED} <= theirs.keys()
    for name in theirs.keys() - {"-h", "--help"}:
        try:
            read([name if theirs[name].nargs == 0 else f"{name}=1"])
        except SystemExit:
            printed = capsys.readouterr().err
            assert not any(word in printed for word in ("unrecognized", "ignored explicit", "expected")), (
                printed
            )
