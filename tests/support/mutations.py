"""Breaks each rule of the scheduler's decisions, one by one, and reports the rules that no test misses.

``python -m tests.support.mutations [WORD ...]`` runs the short tests of the scheduler once for each mutation,
or for those whose rule contains a word, until a test fails. It exits with 1 if a mutation survives, or if its
text is no longer found.
"""

import importlib
import os
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import Phase, settings

# fmt: off
# Rule, file in scheduler_svc, text, mutation.
_MUTATIONS: Final = [
    ("nothing follows a failed plan until all are answered", "replica/scheduler.py", "if self._draining or (out", "if (out"),
    ("nothing follows a suspect's plan", "replica/scheduler.py", "(out and self._last_is_suspect)", "False"),
    ("one plan at a time while there are suspects", "replica/scheduler.py", "depth = 1 if slots.has_suspects else self._depth", "depth = self._depth"),
    ("the worker has no more plans than the depth", "replica/scheduler.py", "waits = out >= depth", "waits = out > depth"),
    ("releases and copies are sent without work, too", "replica/scheduler.py", "if not self._plans and (self.kv.copies", "if False and (self.kv.copies"),
    ("steps that nobody needs are ended", "replica/scheduler.py", "if interrupts and not any(step.here", "if False and not any(step.here"),
    ("suspects and the batch take turns", "replica/scheduler.py", "self._trial_due = True", "self._trial_due = False"),
    ("requests that wait for a prefix end leases", "replica/scheduler.py", "if self._slots.trials or self.num_deferred or", "if self._slots.trials or"),
    ("a lease ends where a chunk is due", "replica/scheduler.py", "return min(self._lease_steps, self._turns.steps_before_chunk)", "return self._lease_steps"),
    ("a request that found no room is tried again after a chunk", "replica/scheduler.py", "if self._chunk_makes_room:\n", "if False:\n"),
    ("chunks end where later ones may begin", "replica/scheduler.py", "if size % self.kv.chunk_unit == 0]", "]"),
    ("a window is kept before a chunk moves it", "replica/scheduler.py", "if one.granted == one.kv.num_computed]", "]"),
    ("requests bind late", "replica/scheduler.py", "return before < _CHUNKS_BOUND * chunk", "return True"),
    ("a request waits for a prefix in progress", "replica/scheduler.py", "or self._slots.waiters.defer_for_prefix(\n            request\n        )", ""),
    ("as few as needed are preempted", "replica/scheduler.py", "for one in order[: count or 0]:", "for one in order if count else ():"),
    ("steps that did not run are taken back", "replica/scheduler.py", "self._turns.take_back(missing)", "pass"),
    ("results for released slots are ignored", "replica/plans.py", "step.left.add(slot)", "pass"),
    ("a released slot grows no more", "replica/plans.py", "if growth.slot != slot]", "]"),
    ("plans skip a slot whose tokens are forced", "replica/plans.py", "step.skipped.add(slot)", "pass"),
    ("steps between two chunks are not interrupted", "replica/plans.py", "self._steps[-1].num_left > 1 and not self._steps[-1].paced", "self._steps[-1].num_left > 1"),
    ("admissions are limited by their bytes", "replica/plans.py", "if room < 0 and count:", "if False:"),
    ("the last token is never computed", "replica/decode_rows.py", "+ 1 < request.end", "< request.end"),
    ("rows run no further than the first end", "replica/decode_rows.py", "min(most_steps, self._first_to_end - self._step)", "most_steps"),
    ("batches take turns", "replica/decode_rows.py", "self._batches.remove(batch)\n                self._batches.append(batch)", "pass"),
    ("tenants pay for their rows", "replica/results.py", "self._owner.charge(tenant, own * count)", "pass"),
    ("a suspect decodes alone", "replica/slots.py", "if not (request.suspect or request.can_fork or waits):", "if not (request.can_fork or waits):"),
    ("a sequence is forked before its window moves", "replica/slots.py", "if self.kv.slides_in_place and self.plans.runs(origin):", "if False:"),
    ("requests that waited for a released one wait in the queue", "replica/slots.py", "for waiter in self.waiters.stop(request):", "for waiter in self.waiters.stop(request) and ():"),
    ("nobody waits for a less urgent request", "replica/prefix_waiters.py", "computing.rank >= request.rank or", ""),
    ("a prefix is there once its window is copied", "replica/prefix_waiters.py", "if not self._copies:", "if True:"),
    ("the plan with the copy has run", "replica/prefix_waiters.py", "if latest < plan]", "]"),
    ("every fourth chunk is the first request's", "policy/rules.py", "if not turn % _CHUNKS_BY_LENGTH:", "if False:"),
    ("the shortest rest goes first", "policy/rules.py", "(one.priority, not one.prefills_forced, one.num_ungranted)", "(one.priority, not one.prefills_forced)"),
    ("the latest of the least urgent yields", "replica/scheduler.py", "victim = max(running,", "victim = min(running,"),
    ("a prompt that missed its target takes turns", "policy/rules.py", "waited_s < target_s <= waited_s", "target_s <= waited_s"),
    ("nobody gives below its own share", "policy/rules.py", "if surplus[tenant] >= -_ROUNDING:", "if True:"),
]
# fmt: on

_ROOT: Final = Path(__file__).parents[2]
_TESTS: Final = {
    "replica": ("tests/unit/scheduler/replica", "tests/unit/scheduler/engine", "tests/property/scheduler/test_machines.py"),
    "policy": ("tests/unit/scheduler/engine", "tests/unit/scheduler/simulation", "tests/property/scheduler/test_waiting_queue.py"),
}  # fmt: skip
_LIMIT_S: Final = 600


class _Mutator:
    """Plugin of pytest: runs the collected tests once for each mutation."""

    def __init__(self, chosen: Sequence[tuple[str, str, str, str]], output: int) -> None:
        self.chosen, self.output = chosen, output
        self.missed = 0

    def pytest_configure(self) -> None:
        """Reports failing examples as they are: shrinking takes minutes."""
        settings.register_profile("mutations", settings.default, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutations")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Prints the first test that fails for each mutation."""
        for rule, file, text, mutation in self.chosen:
            tests = _TESTS[file.partition("/")[0]]
            items = [item for folder in tests for item in session.items if item.nodeid.startswith(folder)]
            verdict = "not found"
            if (_ROOT / "scheduler_svc" / file).read_text().count(text) == 1:
                verdict = _first_failure(session, items, file, text, mutation)
            self.missed += verdict in ("not found", "survives")
            os.write(self.output, f"{rule}: {verdict}\n".encode())
        return True


def _first_failure(
    session: pytest.Session, items: list[pytest.Item], file: str, text: str, mutation: str
) -> str:
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            signal.alarm(_LIMIT_S)
            _mutate(file, text, mutation)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    os.write(write, item.name.encode())
                    break
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as failed:
        name = failed.read()
    _, status = os.waitpid(child, 0)
    return name or ("hangs" if status else "survives")


def _mutate(file: str, text: str, mutation: str) -> None:
    """Gives the functions of a module the code that they have with the mutation."""
    module = importlib.import_module(f"scheduler_svc.{file.removesuffix('.py').replace('/', '.')}")
    mutated = types.ModuleType(module.__name__)
    source = (_ROOT / "scheduler_svc" / file).read_text().replace(text, mutation)
    exec(compile(source, file, "exec"), vars(mutated))  # noqa: S102 - our own code
    _exchange(vars(module), vars(mutated), module.__name__)


def _exchange(old: Mapping[str, Any], new: Mapping[str, Any], module: str) -> None:
    for name, value in old.items():
        if isinstance(value, property):
            _exchange({name: value.fget}, {name: new[name].fget}, module)
        elif getattr(value, "__module__", None) == module and isinstance(value, type):
            _exchange(vars(value), vars(new[name]), module)
        elif isinstance(value, types.FunctionType) and value.__module__ == module:
            value.__code__ = new[name].__code__


def main() -> int:
    """Prints the verdicts; returns the exit status."""
    chosen = [one for one in _MUTATIONS if not sys.argv[1:] or any(word in one[0] for word in sys.argv[1:])]
    mutator = _Mutator(chosen, os.dup(1))
    folders = dict.fromkeys(folder for folders in _TESTS.values() for folder in folders)
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed", "0", "-m", "not slow", "-k", "not scale"]
    status = pytest.main([*options, "-W", "ignore:Module already", *folders], plugins=[mutator])
    print(f"{len(chosen) - mutator.missed} of {len(chosen)} mutations are caught")
    return int(bool(mutator.missed)) or status


if __name__ == "__main__":
    sys.exit(main())
