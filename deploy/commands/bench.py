"""`triptych bench`: measures a running server with vLLM's load generator; needs no package of the clients."""

import sys
from importlib import import_module
from typing import Any


def main(argv: list[str]) -> int:
    """Hands its arguments to `vllm bench serve`; returns 1 if no request succeeded, 2 for a bad flag."""
    # By name: only the worker imports vLLM otherwise. The command `vllm` needs more than the worker's lock.
    serve: Any = import_module("vllm.benchmarks.serve")
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="triptych bench")
    serve.add_cli_args(parser)
    arguments = parser.parse_args(argv[1:] if argv[:1] == ["serve"] else argv)
    try:
        return 0 if serve.main(arguments)["completed"] else 1
    except OSError as error:  # of the connection, or of the tokenizer's files
        print(f"triptych bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
