"""`triptych bench`: measures a running gateway with the workloads of `vllm bench serve`."""

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from deploy.client import workloads
from deploy.client.connection import (
    ClientError,
    Connection,
    add_flags,
    allow_open_files,
    at_least_one,
    connection_of,
    first_model,
    unreachable,
)
from deploy.client.figures import figures, table
from deploy.client.load import Outcome, Pace, send_all
from deploy.client.workloads import Prompt, Server
from deploy.one_line_parser import OneLineParser

_SHOWN_ERRORS = 10


def main(argv: list[str]) -> int:
    """Runs a workload, and prints vLLM's table and one line of JSON.

    Returns:
        The exit code: 0, 1 if the server cannot be reached or no request succeeded.
    """
    # `vllm bench serve` is a command line of three words.
    arguments = _parser().parse_args(argv[1:] if argv[:1] == ["serve"] else argv)
    try:
        connection = connection_of(arguments)
        return asyncio.run(_bench(arguments, connection))
    except ClientError as error:
        print(f"triptych bench: {error}", file=sys.stderr)
        return 1


async def _bench(arguments: argparse.Namespace, connection: Connection) -> int:
    with connection.client() as client:
        model = arguments.model_name or first_model(client, connection)
    pace = Pace(arguments.request_rate, arguments.max_concurrency, arguments.seed)
    async with connection.async_client() as http:
        try:
            prompts = await _prompts(arguments, Server(http, model))
        except httpx.HTTPError as error:
            raise ClientError(unreachable(connection, error)) from error
    print(f"{len(prompts)} requests to {model} at {connection.url}", file=sys.stderr)
    allow_open_files()
    outcomes, duration_s = await send_all(connection, model, prompts, pace, _extra(arguments))
    result = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": len(prompts),
        "request_rate": pace.request_rate if pace.request_rate != float("inf") else "inf",
        "max_concurrency": pace.max_concurrency,
        **figures(outcomes, duration_s),
    }
    _print_errors(outcomes)
    print(table(result, pace.request_rate, pace.max_concurrency))
    _write(result, arguments.json)
    return 0 if result["completed"] else 1


async def _prompts(arguments: argparse.Namespace, server: Server) -> list[Prompt]:
    count, seed = arguments.num_prompts, arguments.seed
    match arguments.dataset_name:
        case "random":
            return await workloads.random_prompts(
                server,
                count,
                input_len=arguments.random_input_len,
                output_len=arguments.random_output_len,
                seed=seed,
            )
        case "sharegpt":
            if arguments.dataset_path is None:
                raise ClientError("--dataset-name sharegpt needs a file; name one with --dataset-path")
            return await workloads.sharegpt_prompts(
                server,
                count,
                path=arguments.dataset_path,
                output_len=arguments.sharegpt_output_len,
                seed=seed,
            )
        case _:
            return await workloads.repeated_prefixes(
                server,
                count,
                prefix_len=arguments.prefix_repetition_prefix_len,
                suffix_len=arguments.prefix_repetition_suffix_len,
                num_prefixes=arguments.prefix_repetition_num_prefixes,
                output_len=arguments.prefix_repetition_output_len,
                seed=seed,
            )


def _extra(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = {
        "ignore_eos": arguments.ignore_eos or None,
        "temperature": arguments.temperature,
        **arguments.extra_body,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _print_errors(outcomes: list[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in errors[:_SHOWN_ERRORS]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > _SHOWN_ERRORS:
        print(f"failed: {len(errors) - _SHOWN_ERRORS} more", file=sys.stderr)


def _write(result: dict[str, Any], path: Path | None) -> None:
    line = json.dumps(result)
    if path is None:
        print(line)
        return
    try:
        path.write_text(f"{line}\n")
    except OSError as error:
        raise ClientError(f"{path} cannot be written ({error.strerror}); change --json") from error


def _rate(text: str) -> float:
    try:
        if (value := float(text)) > 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number above 0, or inf; got {text!r}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="triptych bench",
        description="Measures a running gateway: throughput, and times to and between tokens. It prints a table"
        " and one line of JSON. Flags and figures have the names of `vllm bench serve`.",
        epilog="Example: triptych bench --random-input-len 128 --random-output-len 128 --ignore-eos"
        " --num-prompts 64 --max-concurrency 8",
    )
    parser.add_argument(
        "--dataset-name", choices=("random", "sharegpt", "prefix_repetition"), default="random",
        help="the workload (random)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=at_least_one, default=1000, metavar="N", help="requests (1000)")
    parser.add_argument(
        "--request-rate", type=_rate, default=float("inf"), metavar="R",
        help="requests per second, at random intervals; inf (the default): all at once",
    )  # fmt: skip
    parser.add_argument(
        "--max-concurrency", type=at_least_one, metavar="N", help="requests that run at the same time"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and intervals (0)")
    parser.add_argument("--ignore-eos", action="store_true", help="let every answer reach its length")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the server's")
    parser.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="further fields of each request"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the JSON there instead of printing it"
    )
    parser.add_argument(
        "--model-name", "--model", metavar="NAME", help="default: the first model that the server lists"
    )
    _workload_flags(parser)
    add_flags(parser, "--base-url")
    return parser


def _workload_flags(parser: OneLineParser) -> None:
    group = parser.add_argument_group("random")
    _number(group, "--random-input-len", 1024, "tokens of a prompt")
    _number(group, "--random-output-len", 128, "tokens of an answer")
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
