"""Keeps the ranks of a replica on the same steps.

Rank 0 leads: it announces each step to the other ranks before it launches the step. They launch exactly the
announced steps, in order, so no rank can run a step more than another, whatever ends a plan's work and
whenever the next plan arrives. The ranks of the last stage choose the same tokens independently, because
sampling is a function of logits and counters. Ranks of earlier stages get the tokens from the chooser as the
result of the step. An announcement includes the number of results to apply before its step: a decode step
waits for the earlier steps of its rows, so all ranks know the same of them.

Rank 0 also announces the beginning of each configuration. Another rank begins its next configuration only
then, once per announcement. Until then it keeps the old configuration, because rank 0 may still run steps
with it when the scheduler asks both for the new one. So a rank drops nothing before rank 0 does.
For the same reason rank 0 announces the eviction of a LoRA adapter from the host: its own plans with requests
of the adapter may be ahead of another rank's.

A step failing on a single rank would leave the others waiting in a collective. All ranks refuse a
contradictory plan alike, since state and plans are equal; any other exception ends the process.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from protos.errors import Internal, Unavailable
from protos.step_messages import plan_from_proto, plan_to_proto, result_from_proto, result_to_proto
from protos.steps import Decode, SlotOutput, StepPlan, StepResult, Work, slots_of
from protos.triptych.v1 import worker_pb2
from worker_svc.devices.base import Device
from worker_svc.graphs.compilation import graph_options
from worker_svc.graphs.fingerprint import package_versions
from worker_svc.pending_step import PendingStep
from worker_svc.ranks.group import RankGroup
from worker_svc.settings import Settings

# Flags with an effect on a step's collectives or results.
_FLAGS = (
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "backend", "enable_warm_up", "compile_strict", "rbln_backend", "rbln_use_device_tensor",
    "rbln_num_devices_per_local_rank", "rbln_use_custom_kernel", "rbln_moe_use_opt_kernel", "rbln_moe_custom_kernel",
    "sampling_on_device",
)  # fmt: skip


def rank_facts(settings: Settings, device: Device, dtype: str) -> dict[str, str]:
    """Returns the properties that all ranks must share, by their names for people."""
    options = graph_options(settings, device)
    flags = {f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in _FLAGS}
    return {
        "device": device.product_name(),
        "dtype": dtype,
        "-O": str(options.level),
        "candidate_compile_sizes": "all" if options.sizes is None else str(sorted(options.sizes)),
        **flags,
        **{
            f"version of {package}": version
            for package, version in package_versions(device, "triptych").items()
        },
    }


_PLAN, _RESET, _BEGIN, _UNLOAD = b"p", b"r", b"c", b"u"
_COUNT_BYTES, _ID_BYTES = 4, 8


class PlanRefused(Internal):
    """A plan contradicts earlier plans. All ranks raise it alike, before the device gets work."""


GiveUp = Callable[[str], None]
"""Ends the process, with the reason."""


class Steps(Protocol):
    """The engine of a rank, `execution.engine.Engine`."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Applies a plan and hands its step to the device."""
        ...

    def apply(self, result: StepResult) -> None:
        """Applies the last stage's result of the oldest pending step."""

    def reset(self) -> None:
        """Frees every slot."""


class _Results:
    """Step results received by a rank before the last stage."""

    def __init__(self) -> None:
        self._arrived: deque[StepResult] = deque()
        self._changed = threading.Condition()

    def add(self, message: bytes) -> StepResult:
        result = result_from_proto(worker_pb2.StepResult.FromString(message))
        with self._changed:
            self._arrived.append(result)
            self._changed.notify()
        return result

    def take(self, count: int, *, more: bool = False) -> list[StepResult]:
        """Waits for `count` results and returns them, the oldest; with `more`, all received."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._arrived) >= count)
            return [self._arrived.popleft() for _ in range(len(self._arrived) if more else count)]


class _Together:
    """Ends the process if a block raises: other ranks may wait for this rank."""

    def __init__(self, group: RankGroup, give_up: GiveUp) -> None:
        self._group = group
        self._give_up = give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # All ranks refuse a plan alike.
        if isinstance(error, Exception) and not isinstance(error, PlanRefused):
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            self._give_up(f"rank {self._group.layout.rank} cannot go on with its group ({reason})")


class Leader:
    """Rank 0: announces the scheduler's steps, and launches them."""

    def __init__(self, engine: Steps, group: RankGroup, give_up: GiveUp) -> None:
        """Leads `group`; calls `give_up` if a step breaks it."""
        self._engine = engine
        self._group = group
        self._together = _Together(group, give_up)
        self._results = _Results()
        # The slots of each step without an applied result, received or not.
        self._unapplied: deque[Sequence[int]] = deque()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Announces a step and launches it; see `Engine.launch`.

        A decode step of a pipeline first waits for the results of its rows' steps under way. Another thread
        must be reading them.
        """
        with self._together:
            self._announce(_PLAN, plan_to_proto(plan).SerializeToString(), self._num_needed(plan.work))
            launched = self._engine.launch(plan)
        if self._group.layout.is_last_stage or launched.work is None:
            return launched
        self._unapplied.append(slots_of(launched.work))
        return replace(launched, read_result=self._wait_for_result, runs_ahead=True)

    def _num_needed(self, work: Work | None) -> int:
        """Returns how many results must be applied first: all up to the last of the rows' steps under way."""
        if not isinstance(work, Decode):
            return 0
        rows = set(work.slots)
        counts = (count for count, slots in enumerate(self._unapplied, 1) if not rows.isdisjoint(slots))
        return max(counts, default=0)

    def _announce(self, kind: bytes, message: bytes = b"", num_needed: int = 0) -> None:
        """Announces the next action, and applies the results that all ranks apply before it."""
        results = self._results.take(num_needed, more=True)
        self._group.plans.send(kind + len(results).to_bytes(_COUNT_BYTES, "little") + message)
        for result in results:
            self._engine.apply(result)
            self._unapplied.popleft()

    def _wait_for_result(self) -> StepResult:
        """Returns the next result; the chooser sends them in the order of the steps."""
        with self._together:
            return self._results.add(self._group.results.receive())

    def reset(self) -> None:
        """Frees every slot, on all ranks."""
        with self._together:
            self._announce(_RESET)
            self._engine.reset()

    def unload(self, adapter_id: int) -> None:
        """Announces an adapter's eviction from the host; the other ranks free it after earlier plans."""
        with self._together:
            self._announce(_UNLOAD, adapter_id.to_bytes(_ID_BYTES, "little"))

    def begin(self) -> None:
        """Announces a new configuration, after the results of all steps; the other ranks drop theirs."""
        with self._together:
            self._announce(_BEGIN, num_needed=len(self._unapplied))


class Follower:
    """Another rank: launches the steps announced by rank 0."""

    def __init__(
        self, engine: Steps, group: RankGroup, give_up: GiveUp, release: Callable[[], None],
        unload: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Follows the leader of `group`. `release` drops the configuration, `unload` a host's adapter."""
        self._unload = unload
        self._engine = engine
        self._group = group
        self._give_up = give_up
        self._together = _Together(group, give_up)
        self._release = release
        self._results = _Results()
        self.num_begun = 0
        """Configurations begun by rank 0."""
        self._num_own = 0
        layout = group.layout
        self._reports = layout.chooses and layout.pipeline > 1
        if not layout.is_last_stage:
            threading.Thread(target=self._receive_results, name="rank-results", daemon=True).start()

    @property
    def may_begin(self) -> bool:
        """Whether rank 0 is a configuration ahead."""
        return self.num_begun > self._num_own

    def begin(self) -> None:
        """Begins the next configuration.

        Raises:
            Unavailable: if rank 0 has not begun it.
        """
        if not self.may_begin:
            raise Unavailable("rank 0 has not begun this configuration", retry_after_ms=200)
        self._num_own += 1

    def end_if_unasked(self, number: int) -> None:
        """Ends the process unless this rank has begun configuration `number`: rank 0 waits for it."""
        if self._num_own < number:
            self._give_up("rank 0 has begun a configuration that this rank was not asked for")

    def wait(self) -> bytes:
        """Waits for the next announcement. Call it on a thread of its own."""
        with self._together:
            return self._group.plans.receive()

    def run(self, announcement: bytes) -> Callable[[], None] | None:
        """Launches an announced step. Returns the rest of its work, if any, for any thread.

        The rest begins with a wait for the step's tokens.
        """
        kind, count = announcement[:1], int.from_bytes(announcement[1 : 1 + _COUNT_BYTES], "little")
        message = announcement[1 + _COUNT_BYTES :]
        with self._together:
            # The last stage knows its tokens already.
            for result in self._results.take(0 if self._group.layout.is_last_stage else count):
                self._engine.apply(result)
            if kind == _PLAN:
                return self._launch(plan_from_proto(worker_pb2.StepPlan.FromString(message)))
            if kind == _RESET:
                self._engine.reset()
            elif kind == _BEGIN:
                self._release()
                self.num_begun += 1
            else:
                self._unload(int.from_bytes(message, "little"))
        return None

    def _launch(self, plan: StepPlan) -> Callable[[], None] | None:
        try:
            launched = self._engine.launch(plan)
        except PlanRefused:
            return None  # on all ranks
        if not self._reports or launched.work is None:
            return None
        if launched.runs_ahead:
            return lambda: self._report(plan, launched.read)
        # The next step may overwrite unread results.
        known = launched.read()
        return lambda: self._report(plan, lambda: known)

    def _report(self, plan: StepPlan, read: Callable[[], tuple[Sequence[int], Sequence[SlotOutput]]]) -> None:
        """Sends a step's result to the other stages."""
        with self._together:
            tokens, outputs = read()
            message = result_to_proto(plan, StepResult(plan.step, tokens, outputs))
            self._group.results.send(message.SerializeToString())

    def _receive_results(self) -> None:
        # Without this thread, the next step would wait indefinitely.
        with contextlib.suppress(Exception), self._together:
            while True:
                self._results.add(self._group.results.receive())
