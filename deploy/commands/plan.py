"""`triptych plan`: proposes the decode and prefill buckets that pad least for the traffic of a scheduler."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from protos.errors import ConfigurationRefused
from protos.service.help import ArgumentParser
from protos.service.settings import load
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import DamagedHistogram, RecordedBatches, histogram_path
from scheduler_svc.shapes.buckets import BucketPlan, BucketUsage, decode_buckets, plan_buckets, plan_chunks


class _NoPlanError(Exception):
    """There is nothing to propose; the message is a line."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 0; 1 without a usable histogram; 2 for a bad setting in the environment."""
    arguments = _parser().parse_args(argv)
    try:
        path = arguments.histogram or histogram_path(arguments.state_dir or _state_dir())
        recorded = _read(path)
        plan = _plan(recorded, arguments.graphs, arguments.max_batch)
        prefill = _plan_prefill(recorded, arguments.prefill_graphs)
    except (_NoPlanError, ConfigurationRefused) as error:
        print(f"triptych plan: {error}", file=sys.stderr)
        return 1 if isinstance(error, _NoPlanError) else 2
    proposal = _proposal(path, recorded, plan, prefill)
    print(json.dumps(proposal, indent=2) if arguments.json else _table(proposal))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="triptych plan",
        description="Reads the sizes of a scheduler's steps and proposes the buckets that pad least.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--histogram", type=Path, metavar="PATH", help="the file with the recorded batch sizes"
    )
    where.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="the scheduler's --state-dir (TRIPTYCH_STATE_DIR)"
    )
    parser.add_argument(
        "--graphs", type=_count, metavar="N", help="compile at most N decode graphs (default: as many as now)"
    )
    parser.add_argument(
        "--prefill-graphs",
        type=_count,
        metavar="N",
        help="compile at most N prefill graphs (default: as many as now)",
    )
    parser.add_argument(
        "--max-batch",
        type=_count,
        metavar="N",
        help="largest decode batch, like --max-num-seqs (default: as now)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 4096, not {text}")
    return int(text)


def _state_dir() -> Path:
    state_dir = load(Settings, []).state_dir
    if state_dir is None:
        raise _NoPlanError(
            "no state folder is set: start the scheduler with --state-dir DIR, and plan with the same DIR"
        )
    return state_dir


def _read(path: Path) -> RecordedBatches:
    try:
        recorded = RecordedBatches.read(path)
    except FileNotFoundError:
        raise _NoPlanError(f"{path} does not exist yet: the scheduler writes it while it serves") from None
    except DamagedHistogram as error:
        raise _NoPlanError(f"{path} is not a histogram: {error}") from None
    except OSError as error:
        raise _NoPlanError(f"{path} cannot be read: {error.strerror}") from None
    if not recorded.counts:
        raise _NoPlanError(f"{path} has no decode steps yet: send requests to the scheduler first")
    return recorded


def _plan(recorded: RecordedBatches, graphs: int | None, max_batch: int | None) -> BucketPlan:
    """Plans the buckets. Recorded steps with more rows than `max_batch` count as steps with `max_batch`."""
    most = max_batch or (recorded.buckets or (max(recorded.counts),))[-1]
    current = recorded.buckets or decode_buckets("exponential", max_batch=most)
    current = (*(bucket for bucket in current if bucket < most), most)
    counts: dict[int, int] = {}
    for rows, steps in recorded.counts.items():
        counts[min(rows, most)] = counts.get(min(rows, most), 0) + steps
    return plan_buckets(counts, current, max_batch=most, graphs=graphs or len(current))


def _plan_prefill(recorded: RecordedBatches, graphs: int | None) -> BucketPlan | None:
    current = recorded.prefill_buckets
    if not current or not recorded.chunk_counts:
        return None
    return plan_chunks(
        recorded.chunk_counts, current, block_size=recorded.block_size, graphs=graphs or len(current)
    )


def _proposal(
    path: Path, recorded: RecordedBatches, plan: BucketPlan, prefill: BucketPlan | None
) -> dict[str, Any]:
    buckets = ",".join(map(str, plan.best.buckets))
    flags = ["--decode-bucket-strategy", "manual", "--decode-buckets", buckets]
    environment = {
        "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY": "manual",
        "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS": buckets,
    }
    most = plan.best.buckets[-1]
    if recorded.buckets and most != recorded.buckets[-1]:
        flags += ["--max-num-seqs", str(most)]
        environment["TRIPTYCH_MAX_NUM_SEQS"] = str(most)
    if prefill is not None:
        chunks = ",".join(map(str, prefill.best.buckets))
        flags += ["--prefill-buckets", chunks]
        environment["TRIPTYCH_PREFILL_BUCKETS"] = chunks
    return {
        "histogram": str(path),
        "model": recorded.model,
        **_comparison(plan, "rows"),
        "prefill": None if prefill is None else _comparison(prefill, "tokens"),
        "flags": flags,
        "environment": environment,
    }


def _comparison(plan: BucketPlan, unit: str) -> dict[str, Any]:
    return {
        "steps": plan.current.num_steps,
        f"mean_{unit}": plan.current.num_rows / plan.current.num_steps,
        "now": _usage(plan.current, unit),
        "proposed": _usage(plan.best, unit),
        "gain": plan.gain,
    }


def _usage(usage: BucketUsage, unit: str) -> dict[str, Any]:
    return {
        "buckets": list(usage.buckets),
        unit: usage.rows_run,
        f"padded_{unit}": usage.padded_rows,
        "padding_share": usage.padding_share,
    }


def _table(proposal: dict[str, Any]) -> str:
    lines = [f"{proposal['histogram']}: {proposal['model']}", ""]
    parts = [("decode", "rows", proposal), ("prefill", "tokens", proposal["prefill"])]
    for kind, unit, part in parts:
        if part is not None:
            lines += [*_part(kind, unit, part), ""]
    changed = [part for _, _, part in parts if part and part["now"]["buckets"] != part["proposed"]["buckets"]]
    if not changed:
        lines.append("The current buckets are already the best; more graphs may pad less.")
        return "\n".join(lines)
    lines += [
        "To use them, also with `triptych up`:",
        f"  triptych scheduler {' '.join(proposal['flags'])}",
        "or",
    ]
    lines += [f"  {name}={value}" for name, value in proposal["environment"].items()]
    return "\n".join(lines)


def _part(kind: str, unit: str, part: dict[str, Any]) -> list[str]:
    lines = [f"{part['steps']:,} {kind} steps, {part[f'mean_{unit}']:.1f} {unit} each"]
    lines.append(
        f"{'':<8}  {'graphs':>6}  {f'{unit} run':>16}  {f'padded {unit}':>16}  {'share':>6}  buckets"
    )
    for name in ("now", "proposed"):
        usage, buckets = part[name], ",".join(map(str, part[name]["buckets"]))
        counts = f"{len(usage['buckets']):>6}  {usage[unit]:>16,}  {usage[f'padded_{unit}']:>16,}"
        lines.append(f"{name:<8}  {counts}  {usage['padding_share']:>6.1%}  {buckets}")
    gain = part["gain"]
    if part["now"]["buckets"] != part["proposed"]["buckets"]:
        lines.append(f"Expected: {abs(gain):.1%} {'fewer' if gain >= 0 else 'more'} {unit} to run.")
    return lines
