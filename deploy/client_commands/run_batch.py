"""`triptych run-batch`: runs a file of OpenAI batch requests."""

import argparse
import asyncio
import sys
from pathlib import Path

from deploy.client.batch_file import BatchOutput
from deploy.client.batch_run import BatchRun
from deploy.client.connection import (
    ClientError,
    Connection,
    add_flags,
    at_least_one,
    connection_of,
    first_model,
)
from deploy.client.local_stack import local_stack
from deploy.one_line_parser import OneLineParser


def main(argv: list[str]) -> int:
    """Runs what is not done yet.

    Returns:
        The exit code: 0 if the output has all lines, 1 if the batch stopped before, 2 for a bad flag.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.model is None:
        parser.parse_args(argv)  # refuses what is left
    if arguments.model is not None and arguments.url is not None:
        parser.error("--model starts a stack, and --url names a running gateway; omit one of them")
    try:
        _check_files(arguments)
        if arguments.model is None:
            return _run(arguments, connection_of(arguments))
        with local_stack(arguments.model, rest) as connection:
            return _run(arguments, connection)
    except ClientError as error:
        print(f"triptych run-batch: {error}", file=sys.stderr)
        return error.exit_code


def _check_files(arguments: argparse.Namespace) -> None:
    for flag, path in (("-i", arguments.input_file), ("-o", arguments.output_file)):
        if str(path).startswith(("http:", "https:")):
            raise ClientError(f"{flag} takes a file; copy it from or to {path} with another program")
    if not arguments.input_file.is_file():
        raise ClientError(f"{arguments.input_file} is not a file; change -i")


def _run(arguments: argparse.Namespace, connection: Connection) -> int:
    with connection.client() as client:
        # Before anything is written: whether the server answers and takes the key.
        first_model(client, connection)
    counts = asyncio.run(_batch(arguments, connection))
    print(f"{counts}; written to {arguments.output_file}")
    return 0


async def _batch(arguments: argparse.Namespace, connection: Connection) -> object:
    output = BatchOutput(arguments.output_file)
    output.open()
    try:
        async with connection.async_client() as http:
            run = BatchRun(http, connection, output, arguments.max_concurrency)
            await run.run(arguments.input_file)
            return run.counts
    finally:
        output.close()


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="triptych run-batch",
        description="Runs a file of OpenAI batch requests. The output file gets one line for each, as they end;"
        " the same command goes on where an earlier run stopped.",
        epilog="Example: triptych run-batch -i batch.jsonl -o answers.jsonl --model smollm2",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="the requests")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="the answers")
    parser.add_argument(
        "--model", metavar="MODEL",
        help="start a stack with this model for the batch; all other flags are those of `triptych up`",
    )  # fmt: skip
    parser.add_argument(
        "--max-concurrency", type=at_least_one, default=64, metavar="N",
        help="requests that run at the same time (64)",
    )  # fmt: skip
    add_flags(parser)
    return parser
