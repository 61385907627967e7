"""The command `triptych`. Each subcommand imports what it runs, and nothing else: a gateway never loads torch."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from deploy.launcher.parent import die_with_launcher

# Subcommand: module whose `main(argv)` runs it, extra that installs what it needs, help.
_SERVICES = {
    "up": (
        "deploy.commands.up",
        "gateway,scheduler,worker",
        "serve a model on this machine: all three services",
    ),
    "gateway": ("gateway.__main__", "gateway", "start the HTTP gateway alone"),
    "scheduler": ("scheduler_svc.__main__", "scheduler", "start the scheduler alone"),
    "worker": ("worker_svc.__main__", "worker", "start one worker alone"),
    "plan": ("deploy.commands.plan", "scheduler", "propose decode buckets that fit the traffic so far"),
    "compile": ("deploy.commands.compile", "worker", "compile a model's graphs without serving"),
    "catalog": ("deploy.commands.catalog", "worker", "list, verify, prune or export compiled code"),
    "models": ("deploy.commands.models", "worker", "fetch one of the packaged demo models"),
}
_OURS = {"deploy", "gateway", "protos", "scheduler_svc", "worker_svc"}
_EPILOG = """\
`triptych COMMAND --help` shows a command's flags. Every flag of a service is also a variable:
--max-num-seqs is TRIPTYCH_MAX_NUM_SEQS.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments without the program's name; `sys.argv` if None.

    Returns:
        The exit code: 0 fine, 1 failed, 2 a bad flag or setting, 130 Ctrl-C.
    """
    die_with_launcher(os.environ)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["version"], ["--version"]):
        print(f"triptych {version('triptych')}")
        return 0
    if not arguments or arguments[0] not in _SERVICES:
        parser = _parser()
        parser.parse_args(arguments or ["--help"])
        raise AssertionError("unreachable: --help and unknown commands exit")
    name, *rest = arguments
    module, extra, _ = _SERVICES[name]
    try:
        run: Callable[[list[str]], int] = importlib.import_module(module).main
        return run(rest)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OURS:
            raise
        print(
            f"triptych {name}: {missing} is not installed; pip install 'triptych[{extra}]'", file=sys.stderr
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triptych",
        description="Serves large language models on static-graph accelerators.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=16),
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, _, text) in _SERVICES.items():
        commands.add_parser(name, help=text)
    commands.add_parser("version", help="print the version")
    return parser


if __name__ == "__main__":
    sys.exit(main())
