"""`triptych simulate`: what clients of a deployment will see, from a trace and a model of step times."""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_settings import SettingsConfigDict

from protos.errors import ConfigurationRefused, TriptychError
from protos.service.help import ArgumentParser
from protos.service.logs import configure
from protos.service.settings import load
from scheduler_svc.settings import Settings
from scheduler_svc.simulation.capacity import STEADY_S, Limits, Simulate, find_rate
from scheduler_svc.simulation.generator import KINDS, Range, generate
from scheduler_svc.simulation.plot import svg
from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.run import simulate
from scheduler_svc.simulation.step_times import StepTimes, learn, profiles
from scheduler_svc.simulation.traces import read_trace

_LIMITS = tuple(itertools.product(("ttft", "gap", "latency"), ("p50", "p90", "p99")))


class SimulatedSettings(Settings):
    """The scheduler's settings in a simulation."""

    model_config = SettingsConfigDict(cli_prog_name="triptych simulate", use_attribute_docstrings=True)


def main(argv: list[str]) -> int:
    """Returns the exit code: 0; 1 if the scheduler left requests over; 2 for a bad flag, setting or file."""
    options, rest = _parser().parse_known_args(argv)
    try:
        _settings(rest)  # before a long run, and for --help-all
        configure("simulate", level="error", log_format="console")
        times = _step_times(options)
        if times is None:
            return 0
        requests = _requests(options)
        results = [_run(options, rest, varied, requests, times) for varied in _variants(options.sweep)]
    except TriptychError as error:
        print(f"triptych simulate: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationRefused) else 1
    print(_table(results))
    curves = {
        ", ".join(filter(None, [_named(result), _curve(tenant)])): times
        for result in results
        for tenant, times in result.pop("curves").items()
    }
    try:
        if options.svg:
            options.svg.write_text(svg(curves), encoding="utf-8")
        if options.json:
            result = {"sweep": results} if options.sweep else results[0]
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"triptych simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


# ---- arguments ----


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="triptych simulate",
        description="Runs the production scheduler on a virtual clock: prints the times to first tokens, gaps,"
        " latencies and throughput that clients of a deployment will see.",
        epilog="The scheduler's own flags steer the simulated one, such as --max-num-seqs,"
        " --max-num-batched-tokens or --tenant-weights; --help-all lists them.",
        allow_abbrev=False,
    )
    _add_requests(parser.add_argument_group("Requests"))
    _add_deployment(parser.add_argument_group("Deployment"))
    _add_answer(parser.add_argument_group("Answer"))
    return parser


def _add_requests(asked: argparse._ArgumentGroup) -> None:
    source = asked.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests: JSON lines (also Mooncake's), or CSV of Azure or BurstGPT",
    )
    source.add_argument("--generate", choices=KINDS, help="make requests of this kind")
    asked.add_argument(
        "--requests", type=_count, metavar="N", help="how many to make, or to take from the trace"
    )
    asked.add_argument("--rate", type=_positive, metavar="R", help="made requests a second (default: 1)")
    asked.add_argument(
        "--prompt-tokens",
        type=_range,
        metavar="N-M",
        help="new tokens of each made prompt: a number or a range",
    )
    asked.add_argument("--output-tokens", type=_range, metavar="N-M", help="tokens of each answer, likewise")
    asked.add_argument(
        "--shared-tokens", type=_whole, metavar="N", help="tokens with which all made prompts begin"
    )
    asked.add_argument("--turns", type=_range, metavar="N-M", help="requests of a conversation or an agent")
    asked.add_argument(
        "--pause",
        dest="pause_s",
        type=_duration,
        metavar="TIME",
        help="mean time from an answer to the next turn",
    )
    asked.add_argument("--seed", type=_whole, metavar="N", help="makes other requests of the same kind")


def _add_deployment(with_what: argparse._ArgumentGroup) -> None:
    with_what.add_argument("--replicas", type=_count, default=1, metavar="N", help="workers (default: 1)")
    with_what.add_argument(
        "--step-times", metavar="FILE", help=f"step times: a file, or one of {', '.join(profiles())}"
    )
    with_what.add_argument(
        "--learn",
        metavar="URL",
        help="learn step times from a running gateway; with --step-times, save them there",
    )
    with_what.add_argument(
        "--blocks", type=_count, metavar="N", help="KV blocks of each replica, like --num-blocks"
    )


def _add_answer(answer: argparse._ArgumentGroup) -> None:
    answer.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    answer.add_argument("--svg", type=Path, metavar="FILE", help="also plot the times")
    answer.add_argument(
        "--find",
        choices=["rate"],
        help="the most requests a second that keep the limits below, rejecting none",
    )
    for name, part in _LIMITS:
        answer.add_argument(
            f"--{name}-{part}", type=_duration, metavar="TIME", help=f"limit of --find: the {part} of {name}"
        )
    answer.add_argument(
        "--sweep", action="append", type=_sweep, default=[], metavar="FLAG=A,B,C",
        help="compare values of a setting or of replicas, lists separated by ';'; several sweeps are combined",
    )  # fmt: skip


def _checked(text: str, kind: type, least: float, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < 1e12:
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")
    return value


def _count(text: str) -> int:
    return int(_checked(text, int, 1, "a whole number from 1"))


def _whole(text: str) -> int:
    return int(_checked(text, int, 0, "a whole number from 0"))


def _positive(text: str) -> float:
    return float(_checked(text, float, 1e-9, "a number above 0"))


def _range(text: str) -> Range:
    low, _, high = text.partition("-")
    least, most = _count(low), _count(high or low)
    if most < least:
        raise argparse.ArgumentTypeError(f"must be a number or a range such as 100-200, not {text!r}")
    return least, most


def _duration(text: str) -> float:
    for unit, seconds in (("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            what = "a time such as 300ms or 1.5s"
            return float(_checked(text.removesuffix(unit), float, 0, what)) * seconds
    raise AssertionError("unreachable: every text ends with nothing")


def _sweep(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, values = text.removeprefix("--").partition("=")
    if not equals or not all(parts := values.split(";" if ";" in values else ",")):
        raise argparse.ArgumentTypeError(
            f"must be a flag and its values, such as max-num-seqs=32,64, not {text!r}"
        )
    return name, tuple(parts)


def _step_times(options: argparse.Namespace) -> StepTimes | None:
    """Returns the step times; None if they were learned into a file and there is nothing to simulate."""
    if options.learn:
        has_requests = bool(options.trace or options.generate)
        _check_learn(options, has_requests=has_requests)
        times = learn(options.learn)
        if options.step_times:
            times.write(Path(options.step_times))
            print(f"step times are in {options.step_times}")
        return times if has_requests else None
    if not options.step_times:
        raise ConfigurationRefused(
            f"give --step-times a file or one of {', '.join(profiles())}, or --learn the URL of a running gateway"
        )
    return StepTimes.read(options.step_times)


def _check_learn(options: argparse.Namespace, *, has_requests: bool) -> None:
    if options.step_times in profiles():
        raise ConfigurationRefused(
            f"--step-times {options.step_times} is a profile of Triptych; save what --learn finds in a file"
        )
    if has_requests:
        return
    if not options.step_times:
        raise ConfigurationRefused(
            "--learn needs --step-times FILE to save to, or requests to simulate: --trace or --generate"
        )
    for name in ("find", "sweep", "json", "svg"):
        if getattr(options, name):
            raise ConfigurationRefused(f"--{name} needs requests: --trace or --generate")


def _requests(options: argparse.Namespace, count: int | None = None) -> list[SimulatedRequest]:
    """Reads or makes the requests; `count` is for made ones without a number of their own."""
    fields = ("rate", "prompt_tokens", "output_tokens", "shared_tokens", "turns", "pause_s", "seed")
    given = {name: value for name in fields if (value := getattr(options, name)) is not None}
    if options.generate:
        if number := options.requests or count:
            given["requests"] = number
        return generate(replace(KINDS[options.generate], **given))
    if given:
        raise ConfigurationRefused(
            f"--{next(iter(given)).removesuffix('_s').replace('_', '-')} is for --generate; a trace has its own"
        )
    if options.trace is None:
        raise ConfigurationRefused(f"give --trace a file, or --generate one of {', '.join(KINDS)}")
    return read_trace(options.trace, options.requests)


# ---- runs ----


def _variants(sweeps: Sequence[tuple[str, tuple[str, ...]]]) -> list[dict[str, str]]:
    """Returns every combination of the swept values, by flag."""
    names = [name for name, _ in sweeps]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(values for _, values in sweeps))
    ]


def _run(
    options: argparse.Namespace, rest: Sequence[str], varied: Mapping[str, str],
    requests: Sequence[SimulatedRequest], times: StepTimes,
) -> dict[str, Any]:  # fmt: skip
    """Returns the figures of one combination; a sweep's begin with its settings, a search's with the rate."""
    flags = [f"--{name}={value}" for name, value in varied.items() if name != "replicas"]
    blocks = [f"--num-blocks={options.blocks}"] if options.blocks else []
    settings = _settings([*rest, *blocks, *flags])
    replicas = _checked_replicas(varied["replicas"]) if "replicas" in varied else options.replicas

    def run(asked: Sequence[SimulatedRequest]) -> dict[str, Any]:
        return simulate(asked, settings, times, replicas=replicas)

    found: dict[str, Any] = {"settings": dict(varied)} if varied else {}
    limits = {
        (f"{name}_s", part): most
        for name, part in _LIMITS
        if (most := getattr(options, f"{name}_{part}")) is not None
    }
    if not options.find:
        if limits:
            raise ConfigurationRefused("limits such as --ttft-p99 are for --find rate")
        return found | run(requests)
    if not limits:
        raise ConfigurationRefused("--find rate needs a limit, such as --ttft-p99 1s")
    return found | _find_rate(options, requests, run, limits)


def _find_rate(
    options: argparse.Namespace, requests: Sequence[SimulatedRequest], run: Simulate, limits: Limits
) -> dict[str, Any]:
    """Returns the highest rate and its figures, from as many requests as a queue needs to grow."""
    rate, figures = find_rate(requests, run, limits, _show_try)
    needed = math.ceil(rate * STEADY_S)
    if len(requests) < needed:
        if options.generate and not options.requests:
            return _find_rate(options, _requests(options, 2 * needed), run, limits)
        print(
            f"{len(requests)} requests last {len(requests) / rate:.0f} s at {rate:.3g} requests/s, too short for a"
            f" queue to grow: the rate is too high. Give {needed} requests or more",
            file=sys.stderr,
        )
    return {"rate": rate} | figures


def _settings(flags: Sequence[str]) -> SimulatedSettings:
    settings = load(SimulatedSettings, flags)
    for name in ("queue_timeout_s", "token_timeout_s"):
        if getattr(settings, name) != SimulatedSettings.model_fields[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationRefused(f"{flag}: no simulated request times out; leave {flag} out")
    return settings


def _checked_replicas(text: str) -> int:
    try:
        return _count(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationRefused(f"--sweep replicas: {error}") from None


def _show_try(rate: float, carried: bool) -> None:
    print(f"{rate:.3g} requests/s: {'carried' if carried else 'too many'}", file=sys.stderr)


# ---- the table ----

_COLUMNS = ("requests", "rejected", "ttft p50", "p90", "p99", "gap p50", "p99", "latency p50", "p99", "tokens/s", "hits", "preempted")  # fmt: skip


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows for all requests and for each tenant of each result, and a line about the replicas."""
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    notes = []
    for result in results:
        name = _named(result)
        rows.append((name or "all", *_cells(result)))
        tenants = result["tenants"].items() if len(result["tenants"]) > 1 else ()
        rows += [(f"  {tenant or 'no tenant'}", *_cells(figures)) for tenant, figures in tenants]
        rate = f"{result['rate']:.3g} requests/s are carried; " if "rate" in result else ""
        notes.append(
            f"{f'{name}: ' if name else ''}{rate}workers are busy {result['utilization']:.0%} of the time,"
            f" {result['padding_share']:.0%} of computed tokens are padding,"
            f" {result['kv_uncomputed_share']:.0%} of allocated KV blocks hold no computed token;"
            f" requests by replica: {' '.join(map(str, result['requests_by_replica']))}"
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip
    return "\n".join([*lines, "", *notes])


def _named(result: Mapping[str, Any]) -> str:
    """Returns the swept settings of a result as text; empty without a sweep."""
    return ", ".join(f"{flag} {value}" for flag, value in result.get("settings", {}).items())


def _curve(tenant: str | None) -> str:
    """Returns the name of a tenant's curve; None is all of them together."""
    if tenant is None:
        return "all"
    return f"tenant {tenant}" if tenant else "no tenant"


def _cells(figures: Mapping[str, Any]) -> list[str]:
    ttft, gap, latency = (figures[f"{name}_s"] for name in ("ttft", "gap", "latency"))
    times = (ttft["p50"], ttft["p90"], ttft["p99"], gap["p50"], gap["p99"], latency["p50"], latency["p99"])
    return [
        f"{figures['requests']:,}",
        f"{figures['rejected']:,}",
        *map(_time, times),
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['prefix_hit_share']:.0%}",
        f"{figures['preemptions']:,}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
