"""`triptych quantize`: makes a folder with quantized weights from a model in bfloat16, without serving."""

import argparse
import sys
import time
from pathlib import Path

from protos.errors import ConfigurationRefused
from protos.service.help import ArgumentParser

_MIB = 2**20
_OWN_TEXT = Path()
"""Stands for no file."""
_BITS = {"w4a16": 4, "w8a16": 8}
_PER_CHANNEL = "channel"
_GROUP_SIZES = ("32", "64", "128", _PER_CHANNEL)
_SHOWN = 3
"""Names in the line about matrices that calibration did not reach."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 2 with the reason in one line if the model cannot be quantized so."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.calibrate_tokens and arguments.calibrate is None:
        parser.error("--calibrate-tokens has no effect without --calibrate; add it")
    # After the arguments are checked: importing torch takes seconds.
    from worker_svc.model_files.loader import resolve
    from worker_svc.model_files.quantize import Calibration, quantize_folder
    from worker_svc.quantized.codes import Scheme

    group = arguments.group_size or ("64" if arguments.scheme == "w4a16" else _PER_CHANNEL)
    scheme = Scheme(_BITS[arguments.scheme], None if group == _PER_CHANNEL else int(group))  # type: ignore[arg-type] # 4 or 8
    head = arguments.lm_head == "w8a16"
    calibration = None
    if arguments.calibrate is not None:
        text = None if arguments.calibrate is _OWN_TEXT else arguments.calibrate
        calibration = Calibration(text, arguments.calibrate_tokens or Calibration.tokens)
    started = time.monotonic()
    try:
        source = resolve(arguments.model)
        _check_served(source)
        made = quantize_folder(
            source, arguments.out.absolute(), scheme, head=head, calibration=calibration, progress=_show
        )
    except ConfigurationRefused as error:
        print(f"triptych quantize: {error}", file=sys.stderr)
        return 2
    if head and not made.has_head:
        print(
            "triptych quantize: the output head, if the model has one, stays as it is: there is neither"
            " lm_head.weight nor model.embed_tokens.weight",
            file=sys.stderr,
        )
    if made.rounded:
        more = len(made.rounded) - _SHOWN
        names = ", ".join(made.rounded[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        print(
            f"triptych quantize: calibration did not reach {len(made.rounded)} matrices, which were rounded: {names}",
            file=sys.stderr,
        )
    print(
        f"{arguments.out}: {made.matrices} matrices, {scheme}; weights {made.bytes_before / _MIB:.0f} MiB ->"
        f" {made.bytes_after / _MIB:.0f} MiB, in {time.monotonic() - started:.1f} s"
    )
    return 0


def _check_served(source: Path) -> None:
    """Refuses models whose architecture workers do not serve, in the worker's own line."""
    from worker_svc.quantized.checkpoint_config import read_config

    if not read_config(source).get("architectures"):
        return  # nothing to check, so vLLM need not be imported, which takes seconds
    from worker_svc.devices.registry import choose_device
    from worker_svc.vllm_adapter import startup
    from worker_svc.vllm_platform import prepare_libraries

    prepare_libraries()
    startup.prepare(choose_device("auto"))
    from worker_svc.vllm_adapter.configuration import refusal_on_error, register_model_class

    with refusal_on_error(f"cannot serve {source}"):
        register_model_class(source, trust_remote_code=True, language_model_only=True)


def _show(done: int, total: int, name: str) -> None:
    if done < total:
        print(f"{done + 1}/{total} {name}", file=sys.stderr, flush=True)


def _file(value: str) -> Path:
    path = Path(value)
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"there is no file {value}; if it is the model, name it before --calibrate, which takes the next word as"
            " its text"
        )
    return path


def _tokens(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of tokens above 0")
    return int(value)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="triptych quantize",
        description="Quantizes the weights of a model and writes a folder in the format of compressed-tensors."
        " Weights are rounded to the nearest code, or chosen by calibration.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a demo model's name or a Hugging Face id")
    parser.add_argument("--scheme", choices=tuple(_BITS), required=True, help="4 or 8 bits a weight")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new folder")
    parser.add_argument(
        "--group-size", choices=_GROUP_SIZES,
        help="inputs that share a scale, or one scale per output channel (default: 64 with w4a16, channel with"
        " w8a16)",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", nargs="?", type=_file, const=_OWN_TEXT, metavar="FILE",
        help="choose the codes by what the model does on text, which takes minutes: text of FILE, or text that"
        " the model writes itself",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-tokens", type=_tokens, metavar="N",
        help="tokens of that text (default: 16384)",
    )  # fmt: skip
    parser.add_argument(
        "--lm-head", choices=("w8a16", "keep"), default="w8a16",
        help="quantize the output head to 8 bits per channel, or keep it (default: w8a16)",
    )  # fmt: skip
    return parser
