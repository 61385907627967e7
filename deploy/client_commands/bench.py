"""`triptych bench`: measures a running gateway with the workloads of `vllm bench serve`."""

import argparse
import asyncio
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from deploy.client import workloads
from deploy.client.connection import (
    ClientError,
    Connection,
    allow_open_files,
    connection_of,
    first_model,
    unreachable,
)
from deploy.client.figures import figures, table
from deploy.client.load import Outcome, Pace, Target, send_all
from deploy.client.workloads import Prompt, Server
from deploy.client_commands.bench_flags import extra_fields, read

_SHOWN_ERRORS: Final = 10
_POLL_S: Final = 0.5


def main(argv: list[str]) -> int:
    """Runs a workload, and prints vLLM's table and one line of JSON.

    Returns:
        The exit code: 0, 1 if the server cannot be reached or no request succeeded, 2 for a bad flag.
    """
    # `vllm bench serve` is a command line of three words.
    arguments = read(argv[1:] if argv[:1] == ["serve"] else argv)
    for note in arguments.notes:
        print(note, file=sys.stderr)
    try:
        connection = connection_of(arguments)
        return asyncio.run(_bench(arguments, connection))
    except ClientError as error:
        print(f"triptych bench: {error}", file=sys.stderr)
        return error.exit_code


async def _bench(arguments: argparse.Namespace, connection: Connection) -> int:
    with connection.client() as client:
        _wait(client, arguments.ready_check_timeout_sec)
        model = arguments.model_name or first_model(client, connection)
    pace = Pace(arguments.request_rate, arguments.max_concurrency, arguments.seed, arguments.burstiness)
    async with connection.async_client() as http:
        server = Server(http, model)
        try:
            prompts = await _prompts(arguments, server)
            if arguments.chat:
                prompts = await workloads.as_text(server, prompts)
        except httpx.HTTPError as error:
            raise ClientError(unreachable(connection, error)) from error
    target = Target(connection, model, arguments.endpoint, chat=arguments.chat, extra=extra_fields(arguments))
    print(f"{len(prompts)} requests to {model} at {connection.url}", file=sys.stderr)
    allow_open_files()
    if arguments.num_warmups > 0:
        at_once = Pace(float("inf"), arguments.max_concurrency)
        _print_errors((await send_all(target, prompts[:1] * arguments.num_warmups, at_once))[0])
    outcomes, duration_s = await send_all(target, prompts, pace)
    measured = figures(
        outcomes,
        duration_s,
        metrics=arguments.percentile_metrics,
        percentiles=arguments.metric_percentiles,
        objectives=dict(arguments.goodput),
    )
    result = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": arguments.backend,
        "model_id": model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": len(prompts),
        **dict(arguments.metadata),
        "request_rate": _in_json(pace.request_rate),
        "burstiness": _in_json(pace.burstiness),
        "max_concurrency": pace.max_concurrency,
        **measured,
    }
    _print_errors(outcomes)
    print(table(measured, pace.request_rate, pace.max_concurrency))
    _write(result, _path(arguments, result))
    return 0 if result["completed"] else 1


def _wait(client: httpx.Client, limit_s: float) -> None:
    """Waits until the server serves a model, or until the time is over: what follows then says why not."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            response = client.get("/v1/models")
            if response.is_client_error or (response.is_success and response.json()["data"]):
                return
        except (httpx.HTTPError, ValueError, LookupError):
            pass
        time.sleep(_POLL_S)


async def _prompts(arguments: argparse.Namespace, server: Server) -> list[Prompt]:
    count, seed = arguments.num_prompts, arguments.seed
    match arguments.dataset_name:
        case "random":
            return await workloads.random_prompts(
                server,
                count,
                input_len=arguments.random_input_len,
                output_len=arguments.random_output_len,
                range_ratio=arguments.random_range_ratio,
                prefix_len=arguments.random_prefix_len,
                seed=seed,
            )
        case "sharegpt":
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


def _in_json(number: float) -> float | str:
    """Returns a number, or the word for infinity, which JSON lacks."""
    return "inf" if number == float("inf") else number


def _print_errors(outcomes: list[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in errors[:_SHOWN_ERRORS]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > _SHOWN_ERRORS:
        print(f"failed: {len(errors) - _SHOWN_ERRORS} more", file=sys.stderr)


def _path(arguments: argparse.Namespace, result: dict[str, Any]) -> Path | None:
    """Returns the file of the JSON, or `None` if it is printed."""
    if not arguments.save_result:
        return arguments.json  # type: ignore[no-any-return]
    limit = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency else ""
    name = str(result["model_id"]).rpartition("/")[2]
    usual = f"{arguments.label or arguments.backend}-{result['request_rate']}qps{limit}-{name}-{result['date']}.json"
    return (arguments.result_dir or Path()) / (arguments.result_filename or usual)


def _write(result: dict[str, Any], path: Path | None) -> None:
    line = json.dumps(result)
    if path is None:
        print(line)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{line}\n")
    except OSError as error:
        raise ClientError(f"{path} cannot be written ({error.strerror}); choose another file") from error
