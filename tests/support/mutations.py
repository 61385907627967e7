"""Breaks rules of the scheduler's decisions and of calls to NPUs, and reports the rules that no test misses.

``python -m tests.support.mutations [WORD ...]`` runs short tests of a rule's module once for each mutation,
or for those whose file or rule contains a word, until a test fails. It exits with 1 if a mutation survives,
or if its text is no longer found.
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
_SCHEDULER: Final = [
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
# The same for files in worker_svc/devices/rbln.
_NPU: Final = [
    ("positions of compiler kernels are int64", "device.py", "torch.int32 if self.namespace == TRITON else torch.int64", "torch.int32"),
    ("positions of Triton kernels are int32", "device.py", "torch.int32 if self.namespace == TRITON else torch.int64", "torch.int64"),
    ("other integers are int32", "device.py", "integers.to(torch.int32, copy=True)", "integers.to(torch.int64)"),
    ("a chunk's table is flat", "device.py", "table[0] if query_len > 1 else table", "table"),
    ("a chunk's window is flat", "device.py", "table[0] if prefill else table", "table"),
    ("padded windows end at 0", "device.py", "step.cache_offset.masked_fill(table == NULL_BLOCK, 0)", "step.cache_offset"),
    ("a window ends after the step's tokens", "device.py", "step.cache_offset.masked_fill(", "(step.cache_offset + 1).masked_fill("),
    ("a window starts before the step's tokens", "device.py", "placed(step.cache_seq_len)", "placed(step.cache_offset)"),
    ("rows start at their first token", "device.py", "(step.seq_lens - counts)[:, None]", "step.seq_lens[:, None]"),
    ("one block has its own kernel", "device.py", "if partitions == 1 else", "if partitions < 1 else"),
    ("two blocks need the kernel for many", "device.py", "if partitions == 1 else", "if partitions <= 2 else"),
    ("chunks and decode steps have their own kernels", "device.py", "flash_causal_attention_naive_{'prefill' if prefill else 'decode'}", "flash_causal_attention_naive_decode"),
    ("windows in blocks have their own kernel", "device.py", "if group.window:\n            return", "if False:\n            return"),
    ("sinks need the kernel for many blocks", "device.py", "if single_block and sinks is not None else", "if False else"),
    ("scores have the layer's scale", "device.py", "scale = self._scales[params.scale]", "scale = self._scales[1.0]"),
    ("the dummy is the scale", "device.py", '"dummy": scale', '"dummy": self._scales[1.0]'),
    ("keys are keys", "device.py", "by_head(call.key, 1)", "by_head(call.value, 1)"),
    ("values are values", "device.py", "by_head(call.value, 1)", "by_head(call.key, 1)"),
    ("groups of heads are consecutive", "device.py", "return states.reshape(rows, kv_heads, heads, query_len, params.head_size)", "return states.reshape(rows, heads, kv_heads, query_len, -1).transpose(1, 2)"),
    ("results return to the order of tokens", "device.py", "query_len, params.head_size).transpose(1, 2)\n        call", "query_len, params.head_size)\n        call"),
    ("the window has its size", "device.py", '"window_size": params.window', '"window_size": params.window - 1'),
    ("windows are causal", "device.py", '"is_causal": True', '"is_causal": False'),
    ("heads have a row of sinks each", "device.py", "sinks[:, None]", "sinks[None].expand(len(sinks), -1)"),
    ("sinks are passed", "device.py", "None if sinks is None else sinks[:, None]", "None"),
    ("keys have a scale", "device.py", '"k_quantize_scale": self._scales[1.0]', '"k_quantize_scale": None'),
    ("values have a scale", "device.py", '"v_quantize_scale": self._scales[1.0]', '"v_quantize_scale": None'),
    ("the namespace decides where blocks are", "device.py", "shape.insert(self.block_dim", "shape.insert(1"),
    ("a block in place holds a window", "device.py", "group.tokens_per_block(block_size)", "block_size"),
    ("head sizes are the kernels'", "device.py", "(32, 64, 80,", "(32, 48, 64, 80,"),
    ("Triton kernels have a namespace", "device.py", "TRITON if options.rbln_use_custom_kernel else CUSTOM", "CUSTOM"),
    ("many blocks: scale before position", "operators.py", "scale seq_idx block_tables dummy", "seq_idx scale block_tables dummy"),
    ("one block: position before scale", "operators.py", '"seq_idx scale block_tables dummy"', '"scale seq_idx block_tables dummy"'),
    ("windows: start before end", "operators.py", "cache_seq_len cache_offset scale", "cache_offset cache_seq_len scale"),
    ("windows in blocks: position before scale", "operators.py", "seq_idx scale block_tables window_size", "scale seq_idx block_tables window_size"),
    ("scales come after sinks", "operators.py", "sinks k_quantize_scale v_quantize_scale", "k_quantize_scale v_quantize_scale sinks"),
    ("a window's mask comes before its sinks", "operators.py", '" attn_mask sinks")', '" sinks attn_mask")'),
    ("Triton operators call keys as the vendor does", "operators.py", '"k": "key"', '"k": "k"'),
]
_MUTATIONS: Final = [
    *((rule, f"scheduler_svc/{file}", text, mutation) for rule, file, text, mutation in _SCHEDULER),
    *((rule, f"worker_svc/devices/rbln/{file}", text, mutation) for rule, file, text, mutation in _NPU),
]
# fmt: on

_ROOT: Final = Path(__file__).parents[2]
_TESTS: Final = {
    "scheduler_svc/replica": ("tests/unit/scheduler/replica", "tests/unit/scheduler/engine", "tests/property/scheduler/test_machines.py"),
    "scheduler_svc/policy": ("tests/unit/scheduler/engine", "tests/unit/scheduler/simulation", "tests/property/scheduler/test_waiting_queue.py"),
    "worker_svc/devices/rbln": ("tests/support/rbln/oracle.py",),
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
            tests = _tests_of(file)
            items = [item for folder in tests for item in session.items if item.nodeid.startswith(folder)]
            verdict = "not found"
            if (_ROOT / file).read_text().count(text) == 1:
                verdict = _first_failure(session, items, file, text, mutation)
            self.missed += verdict in ("not found", "survives")
            os.write(self.output, f"{rule}: {verdict}\n".encode())
        return True


def _tests_of(file: str) -> tuple[str, ...]:
    return next(tests for folder, tests in _TESTS.items() if file.startswith(folder))


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
    """Gives a module's functions and tables the code and the values that they have with the mutation."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    mutated = types.ModuleType(module.__name__)
    source = (_ROOT / file).read_text().replace(text, mutation)
    exec(compile(source, file, "exec"), vars(mutated))  # noqa: S102 - our own code
    _exchange(vars(module), vars(mutated), module.__name__)
    for name, value in vars(mutated).items():
        if name.isupper() and isinstance(value, (dict, tuple)):
            setattr(module, name, value)


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
    words = sys.argv[1:]
    chosen = [
        one for one in _MUTATIONS if not words or any(word in text for word in words for text in one[:2])
    ]
    mutator = _Mutator(chosen, os.dup(1))
    folders = dict.fromkeys(folder for _, file, _, _ in chosen for folder in _tests_of(file))
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed", "0", "-m", "not slow", "-k", "not scale"]
    status = pytest.main([*options, "-W", "ignore:Module already", *folders], plugins=[mutator])
    print(f"{len(chosen) - mutator.missed} of {len(chosen)} mutations are caught")
    return int(bool(mutator.missed)) or status


if __name__ == "__main__":
    sys.exit(main())
