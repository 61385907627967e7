"""`triptych complete`: completions by the model of a running gateway."""

import argparse
import sys

from deploy.client.answers import Answer, add_answer_flags, ask_until_end, limit_of, print_answer
from deploy.client.connection import ClientError, add_flags, connection_of, first_model
from deploy.one_line_parser import OneLineParser


def main(argv: list[str]) -> int:
    """Completes one prompt, or each line of standard input.

    Returns:
        The exit code: 0, 1 if the server cannot be reached or refuses, 2 for a bad flag, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _complete(arguments)
    except ClientError as error:
        print(f"triptych complete: {error}", file=sys.stderr)
        return error.exit_code


def _complete(arguments: argparse.Namespace) -> int:
    connection = connection_of(arguments)
    with connection.client() as client:
        model = arguments.model_name or first_model(client, connection)
        print(f"Using model: {model}", file=sys.stderr)

        def ask(prompt: str) -> Answer:
            body = {"model": model, "prompt": prompt, **limit_of(arguments)}
            return print_answer(client, connection, "/v1/completions", body, stats=arguments.stats)

        if arguments.quick is not None:
            return 130 if ask(arguments.quick).interrupted else 0
        return ask_until_end("Please enter a prompt to complete:", ask)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="triptych complete",
        description="Completes prompts with the model of a running gateway. Ctrl-C ends an answer, a second one"
        " the program.",
        epilog='Example: triptych complete -q "The capital of France is" --max-tokens 32',
    )
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete this prompt and exit")
    add_answer_flags(parser)
    add_flags(parser)
    return parser
