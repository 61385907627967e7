"""`triptych chat`: a conversation with the model of a running gateway."""

import argparse
import sys

from deploy.client.answers import Answer, add_answer_flags, ask_until_end, limit_of, print_answer
from deploy.client.connection import ClientError, add_flags, connection_of, first_model
from deploy.one_line_parser import OneLineParser


def main(argv: list[str]) -> int:
    """Answers one message, or each line of standard input.

    Returns:
        The exit code: 0, 1 if the server cannot be reached or refuses, 2 for a bad flag, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _chat(arguments)
    except ClientError as error:
        print(f"triptych chat: {error}", file=sys.stderr)
        return error.exit_code


def _chat(arguments: argparse.Namespace) -> int:
    connection = connection_of(arguments)
    with connection.client() as client:
        model = arguments.model_name or first_model(client, connection)
        print(f"Using model: {model}", file=sys.stderr)
        conversation: list[dict[str, str]] = []
        if arguments.system_prompt is not None:
            conversation.append({"role": "system", "content": arguments.system_prompt})

        def ask(message: str) -> Answer:
            messages = [*conversation, {"role": "user", "content": message}]
            body = {"model": model, "messages": messages, **limit_of(arguments)}
            answer = print_answer(client, connection, "/v1/chat/completions", body, stats=arguments.stats)
            if answer.text or not answer.interrupted:
                conversation[:] = [*messages, {"role": "assistant", "content": answer.text}]
            return answer

        if arguments.quick is not None:
            return 130 if ask(arguments.quick).interrupted else 0
        return ask_until_end("Please enter a message for the chat model:", ask)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="triptych chat",
        description="Chats with the model of a running gateway. Ctrl-C ends an answer, a second one the program.",
        epilog='Example: triptych chat -q "Name the capital of France."',
    )
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this message and exit")
    parser.add_argument("--system-prompt", metavar="TEXT", help="the system message of the conversation")
    add_answer_flags(parser)
    add_flags(parser)
    return parser
