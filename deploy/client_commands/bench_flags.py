"""The flags of `triptych bench`: those of `vllm bench serve`, and hints for those that are not served."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from deploy.client.connection import add_flags, at_least_one
from deploy.client.figures import METRICS
from deploy.client_commands.vllm_bench_flags import MOOT, MOOT_SWITCHES, REFUSED
from deploy.one_line_parser import OneLineParser

CHAT_PATH: Final = "/v1/chat/completions"
"""Where chats go; every other endpoint takes completions."""
COMPLETIONS_PATH: Final = "/v1/completions"
_CHAT: Final = "openai-chat"
_BACKENDS: Final = ("openai", "vllm", _CHAT)
# Flags that become fields of the same name.
_SAMPLING: Final = (
    "temperature",
    "top-p",
    "top-k",
    "min-p",
    "frequency-penalty",
    "presence-penalty",
    "repetition-penalty",
)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Reads a command line; one that contradicts itself ends the program with one line.

    Returns:
        The flags, and `notes`: a line for each flag without effect.
    """
    parser = _parser()
    arguments = parser.parse_args([_with_dashes(each) for each in argv])
    _choose_endpoint(parser, arguments)
    if arguments.url is None and (arguments.host or arguments.port):
        host = arguments.host or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        arguments.url = f"http://{host}:{arguments.port or 8000}"
    arguments.model_name = arguments.served_model_name or arguments.model_name
    for general, specific in (
        ("input_len", ("random_input_len",)),
        ("output_len", ("random_output_len", "sharegpt_output_len", "prefix_repetition_output_len")),
    ):
        if (value := getattr(arguments, general)) is not None:
            vars(arguments).update(dict.fromkeys(specific, value))
    # As in vLLM: the end of an answer to random tokens means nothing.
    arguments.ignore_eos = arguments.ignore_eos or arguments.dataset_name == "random"
    if arguments.json is not None and arguments.save_result:
        parser.error("--json and --save-result both name a file; omit one")
    _check_workload(parser, arguments)
    if (arguments.result_filename or arguments.result_dir) and not arguments.save_result:
        parser.error("--result-dir and --result-filename need --save-result; add it")
    arguments.notes = [
        f"{flag} has no effect: {reason}"
        for flag, reason in {**MOOT, **MOOT_SWITCHES}.items()
        if getattr(arguments, flag[2:].replace("-", "_")) is not None
    ]
    if arguments.chat_template_kwargs is not None and not arguments.chat:
        arguments.notes.append("--chat-template-kwargs has no effect: completions have no chat template")
    return arguments


def _choose_endpoint(parser: OneLineParser, arguments: argparse.Namespace) -> None:
    """Sets the endpoint, the backend, and whether the endpoint takes chats."""
    chat = arguments.backend == _CHAT
    if arguments.endpoint is None:
        arguments.endpoint = CHAT_PATH if chat else COMPLETIONS_PATH
    if not arguments.endpoint.startswith("/"):
        parser.error(f"--endpoint is a path, for example {CHAT_PATH}; --base-url has the rest")
    if arguments.endpoint.rstrip("/").endswith("chat/completions"):
        if arguments.backend not in {None, _CHAT}:
            parser.error(f"--endpoint {arguments.endpoint} takes chats; use --backend {_CHAT}")
        chat = True
    elif chat:
        parser.error(f"--backend {_CHAT} measures {CHAT_PATH}; change --endpoint or --backend")
    arguments.chat = chat
    arguments.backend = _CHAT if chat else arguments.backend or "openai"


def _check_workload(parser: OneLineParser, arguments: argparse.Namespace) -> None:
    name = arguments.dataset_name
    if name == "sharegpt" and arguments.dataset_path is None:
        parser.error("--dataset-name sharegpt needs a file; name one with --dataset-path")
    if name != "sharegpt" and arguments.dataset_path is not None:
        parser.error(f"--dataset-name {name} reads no file; omit --dataset-path")
    prefixes = arguments.prefix_repetition_num_prefixes
    if name == "prefix_repetition" and arguments.num_prompts < prefixes:
        parser.error(
            f"--prefix-repetition-num-prefixes is {prefixes} and --num-prompts {arguments.num_prompts};"
            " raise --num-prompts"
        )


def extra_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the further fields of each request."""
    chosen = {name: getattr(arguments, name) for name in (flag.replace("-", "_") for flag in _SAMPLING)}
    chosen["ignore_eos"] = arguments.ignore_eos or None
    chosen["chat_template_kwargs"] = arguments.chat_template_kwargs if arguments.chat else None
    if arguments.logprobs is not None:
        chosen |= (
            {"logprobs": True, "top_logprobs": arguments.logprobs}
            if arguments.chat
            else {"logprobs": arguments.logprobs}
        )
    given = {name: value for name, value in chosen.items() if value is not None}
    return {**given, **arguments.extra_body}


def _with_dashes(argument: str) -> str:
    """Returns a flag with dashes in its name, as vLLM reads --num_prompts; any other argument as it is."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


class _Refused(argparse.Action):
    """A flag that is not served."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is not served; {self.const}")


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="triptych bench",
        description="Measures a running gateway: throughput, and times to and between tokens. It prints a table"
        " and one line of JSON. Flags and figures have the names of `vllm bench serve`.",
        epilog="Example: triptych bench --random-input-len 128 --random-output-len 128 --num-prompts 64"
        " --max-concurrency 8",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--backend", choices=_BACKENDS,
        help=f"{_CHAT}: measure {CHAT_PATH}; the others, and the default: {COMPLETIONS_PATH}",
    )  # fmt: skip
    parser.add_argument("--endpoint", metavar="PATH", help="default: what the backend measures")
    parser.add_argument(
        "--dataset-name", choices=("random", "sharegpt", "prefix_repetition"), default="random",
        help="the workload (random)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=at_least_one, default=1000, metavar="N", help="requests (1000)")
    parser.add_argument(
        "--model-name", "--model", metavar="NAME", help="default: the first model that the server lists"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="comes before --model-name")
    _pace_flags(parser)
    _request_flags(parser)
    _result_flags(parser)
    _workload_flags(parser)
    add_flags(parser, "--base-url")
    parser.add_argument("--host", help="of the server, if --url is not set (127.0.0.1)")
    parser.add_argument(
        "--port", type=at_least_one, metavar="N", help="of the server, if --url is not set (8000)"
    )
    for flag in MOOT:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in MOOT_SWITCHES:
        parser.add_argument(flag, action="store_const", const=True, help=argparse.SUPPRESS)
    for flag, advice in REFUSED.items():
        parser.add_argument(flag, action=_Refused, nargs="*", const=advice, help=argparse.SUPPRESS)
    return parser


def _pace_flags(parser: OneLineParser) -> None:
    group = parser.add_argument_group("pace")
    group.add_argument(
        "--request-rate", type=_positive, default=float("inf"), metavar="R",
        help="requests per second, at random intervals; inf (the default): all at once",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="B",
        help="shape of the intervals: 1 is a Poisson process, less is burstier, more is steadier, inf even (1)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=at_least_one, metavar="N", help="requests that run at the same time"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and intervals (0)")
    group.add_argument(
        "--num-warmups",
        type=_not_negative,
        default=0,
        metavar="N",
        help="requests before those that count (0)",
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
        help="wait this long for a server that is not ready (0)",
    )  # fmt: skip


def _request_flags(parser: OneLineParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--ignore-eos", action="store_true",
        help="let every answer reach its length; with --dataset-name random, this is always so",
    )  # fmt: skip
    for name in _SAMPLING:
        kind = int if name == "top-k" else float
        group.add_argument(f"--{name}", type=kind, metavar="X", help="default: the server's")
    group.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities per token")
    group.add_argument("--chat-template-kwargs", type=_object, metavar="JSON", help="of chats")
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="further fields of each request"
    )


def _result_flags(parser: OneLineParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="write the JSON there instead of printing it"
    )
    group.add_argument(
        "--save-result", action="store_true", help="the same, to a file named as vLLM names it"
    )
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="folder of that file (.)")
    group.add_argument("--result-filename", metavar="NAME", help="name of that file")
    group.add_argument("--label", help="begins the name of that file instead of the backend")
    group.add_argument(
        "--metadata", nargs="+", type=_pair, default=[], metavar="KEY=VALUE", help="goes into the JSON"
    )
    group.add_argument(
        "--percentile-metrics", type=_metrics, default=("ttft", "tpot", "itl"), metavar="NAME,…",
        help=f"times to show, of {', '.join(METRICS)} (ttft,tpot,itl)",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=("99",), metavar="P,…", help="percentiles (99)"
    )
    group.add_argument(
        "--goodput", nargs="+", type=_objective, default=[], metavar="NAME:MS",
        help="count requests that meet all of these, for example ttft:500 tpot:50 e2el:5000",
    )  # fmt: skip


def _workload_flags(parser: OneLineParser) -> None:
    parser.add_argument("--input-len", type=at_least_one, metavar="N", help="sets --random-input-len")
    parser.add_argument(
        "--output-len", type=at_least_one, metavar="N", help="sets the workload's -output-len"
    )
    group = parser.add_argument_group("random")
    _number(group, "--random-input-len", 1024, "tokens of a prompt")
    _number(group, "--random-output-len", 128, "tokens of an answer")
    group.add_argument(
        "--random-range-ratio", type=_ratio, default=0.0, metavar="R",
        help="both lengths vary by this share, from 0 to below 1 (0)",
    )  # fmt: skip
    group.add_argument(
        "--random-prefix-len",
        type=_not_negative,
        default=0,
        metavar="N",
        help="tokens before, the same for all (0)",
    )
    group = parser.add_argument_group("sharegpt")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="a JSON file with conversations")
    group.add_argument(
        "--sharegpt-output-len", type=at_least_one, metavar="N",
        help="tokens of an answer; default: as many as the recorded one has",
    )  # fmt: skip
    group = parser.add_argument_group("prefix_repetition")
    _number(group, "--prefix-repetition-prefix-len", 256, "tokens of a prefix")
    _number(group, "--prefix-repetition-suffix-len", 256, "tokens after the prefix")
    _number(group, "--prefix-repetition-num-prefixes", 10, "different prefixes")
    _number(group, "--prefix-repetition-output-len", 128, "tokens of an answer")


def _number(group: argparse._ArgumentGroup, flag: str, default: int, meaning: str) -> None:
    group.add_argument(flag, type=at_least_one, default=default, metavar="N", help=f"{meaning} ({default})")


def _positive(text: str) -> float:
    try:
        if (value := float(text)) > 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number above 0, or inf; got {text!r}")


def _not_negative(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text!r}")


def _ratio(text: str) -> float:
    try:
        if 0 <= (value := float(text)) < 1:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number from 0 to below 1, got {text!r}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if name and equals:
        return name, value
    raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if set(names) <= set(METRICS):
        return names
    raise argparse.ArgumentTypeError(f"must hold names of {', '.join(METRICS)}, got {text!r}")


def _percentiles(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    try:
        if all(0 <= float(word) <= 100 for word in words):
            return tuple(str(float(word)).removesuffix(".0") for word in words)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must hold numbers from 0 to 100, got {text!r}")


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        if name in {"ttft", "tpot", "e2el"} and (value := float(limit)) >= 0:
            return name, value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {text!r}")
