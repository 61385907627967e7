"""`triptych complete`: completions by the model of a running gateway."""

from deploy.argument_parser import ArgumentParser
from deploy.client_commands.chat import run


def main(argv: list[str]) -> int:
    """Completes a prompt, or each line of standard input; returns the exit code of `triptych chat`."""
    parser = ArgumentParser(
        prog="triptych complete",
        description="Completes prompts with the model of a running gateway. Ctrl-C ends an answer, a second one"
        " the program.",
        epilog='Example: triptych complete -q "The capital of France is" --max-tokens 32',
    )
    return run(
        parser,
        argv,
        lambda client, _, prompt, fields: client.completions.create(prompt=prompt, **fields),
        lambda *_: None,
    )
