"""Runs a model on the device, as it would be served, and compares it with the reference."""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.diagnosis.findings import Findings, Missing, Remark

if TYPE_CHECKING:
    from deploy.diagnosis.local_replica import LocalReplica
    from deploy.diagnosis.reference import Reference
    from worker_svc.execution.worker import Worker
    from worker_svc.settings import Settings

_BUCKETS = (1, 2, 4)
_CHUNK = 128
_STEPS = 12
"""Tokens of each answer."""
_REPORTED = 5
"""Log-probabilities that are compared at each step, besides the chosen token's."""


def check(settings: "Settings", findings: Findings, *, needs: Sequence[str]) -> None:
    """Runs the model that the settings name, or a small made-up one, and compares it with the reference.

    Args:
        settings: the worker's; `model` may be empty.
        findings: gets one result for each check.
        needs: checks that must have passed.
    """
    with tempfile.TemporaryDirectory(prefix="triptych-parity-") as folder:
        run = _Parity(settings, Path(folder))
        findings.check("model", run.start, needs=needs)
        findings.check("reference", run.open_reference, needs=("model",))
        ready = ("model", "reference")
        findings.check("prefill", run.prefill, needs=ready)
        for bucket in _BUCKETS:
            name = f"decode, {bucket} row{'s' if bucket > 1 else ''}"
            findings.check(name, partial(run.decode, bucket), needs=ready)
        findings.check("prefix hits", run.prefix_hits, needs=(*ready, "prefill"))
        findings.check("forks", run.forks, needs=(*ready, "prefill"))
        run.close()


class _Parity:
    """One model on the device and its reference."""

    def __init__(self, settings: "Settings", folder: Path) -> None:
        """Opens nothing yet; `folder` takes the made-up model."""
        self._settings = settings
        self._folder = folder
        self._worker: Worker
        self._replica: LocalReplica
        self._reference: Reference
        self._block_size = 0

    def start(self) -> str:
        """Starts the model on the device."""
        from deploy.diagnosis.local_replica import LocalReplica
        from scheduler_svc.settings import Settings as SchedulerSettings
        from worker_svc.execution.worker import Worker

        _hide_progress()
        settings = self._settings
        if not settings.model:
            settings = settings.model_copy(update={"model": str(_make_up(self._folder))})
            if settings.dtype == "auto":  # which would be half precision
                settings = settings.model_copy(update={"dtype": "float32"})
        self._worker = worker = Worker(settings)
        worker.prepare()
        self._block_size = worker.device.default_block_size
        longest = min(worker.description.max_model_len, max(2 * self._block_size, 4 * _CHUNK))
        width = -(-longest // self._block_size)
        shapes = SchedulerSettings(
            max_num_seqs=_BUCKETS[-1], max_num_batched_tokens=_CHUNK, max_model_len=longest, block_size=self._block_size,
            # Enough for every prompt below, and little beside the weights.
            num_blocks=None if settings.kv_memory_on(worker.device.name) else 1 + 8 * width, lease_steps=1,
        )  # fmt: skip
        started = time.monotonic()
        self._replica = LocalReplica(worker, shapes, settings.model, logprobs=_REPORTED)
        dtype = str(worker.description.dtype).removeprefix("torch.")
        model = self._settings.model or "a made-up model"
        return f"{model} in {dtype}, ready after {time.monotonic() - started:.1f} s"

    def open_reference(self) -> str:
        """Loads the model with transformers."""
        from deploy.diagnosis.reference import Reference

        worker, settings = self._worker, self._settings
        advice = "try --dtype float32 and -O 0, and report what changes"
        if worker.device.name == "rbln":
            other = 0 if settings.rbln_use_custom_kernel else 1
            advice = f"try RBLN_USE_CUSTOM_KERNEL={other} and --dtype float32, and report what changes"
        self._reference = Reference(
            worker.folder,
            worker.description.dtype,
            trust_remote_code=settings.trust_remote_code,
            advice=advice,
        )
        return f"{self._reference.name} of transformers, in float32 on this host"

    def prefill(self) -> str:
        """Prefills prompts shorter and longer than a chunk, and one longer than a block if it fits."""
        room = self._worker.description.max_model_len - _STEPS
        lengths = [5, _CHUNK, 2 * _CHUNK + 44, self._block_size + _CHUNK + 7]
        prompts = [self._prompt(length, seed) for seed, length in enumerate(lengths) if length <= room]
        compared = self._reference.compare(self._replica.generate(prompts, 1))
        chunks = sum(-(-len(prompt) // _CHUNK) for prompt in prompts)
        return f"prompts of up to {max(map(len, prompts))} tokens, {chunks} chunks; {compared}"

    def decode(self, bucket: int) -> str:
        """Decodes with all rows of a bucket."""
        prompts = [self._prompt(9 + 31 * row, 10 * bucket + row) for row in range(bucket)]
        before = self._replica.num_steps[bucket]
        compared = self._reference.compare(self._replica.generate(prompts, _STEPS))
        steps = self._replica.num_steps[bucket] - before
        if not steps:
            raise Missing(f"no step ran in the bucket of {bucket}; report this")
        return f"{steps} steps; {compared}"

    def prefix_hits(self) -> str:
        """Sends prompts that share a part, then the same prompts without sharing."""
        first = self._prompt(2 * _CHUNK + 44, 77)
        prompts = [first, [*first[:200], *self._prompt(20, 78)], [*first[:290], *self._prompt(9, 79)]]
        reusing = [self._replica.generate([prompt], _STEPS)[0] for prompt in prompts]
        compared = self._reference.compare(reusing)
        tokens = sum(answer.num_cached for answer in reusing)
        if not tokens:
            if self._replica.copies_blocks:
                raise Missing("a prompt that begins like an earlier one reused nothing; report this")
            raise Remark(f"nothing was reused, because the worker cannot copy blocks; {compared}")
        plain = [
            self._replica.generate([prompt], _STEPS, salt=str(place))[0]
            for place, prompt in enumerate(prompts)
        ]
        windows = ", windows included" if any(group.window for group in self._worker.groups) else ""
        text = f"{tokens} tokens reused{windows}; {compared}"
        if [answer.logprobs for answer in plain] != [answer.logprobs for answer in reusing]:
            raise Remark(
                f"{text}; a run without reuse rounds otherwise, so the kernels do not repeat their bits"
            )
        return f"{text}; to the last bit as without reuse"

    def forks(self) -> str:
        """Generates two sequences for one prompt, which is computed once if the worker copies blocks."""
        before = self._replica.num_forks
        compared = self._reference.compare(
            self._replica.generate([self._prompt(_CHUNK + 50, 99)], _STEPS, n=2)
        )
        if self._replica.num_forks == before:
            if self._replica.copies_blocks:
                raise Missing("the worker copies blocks, but no sequence was forked; report this")
            raise Remark(
                f"every sequence computed its prompt, because the worker cannot copy blocks; {compared}"
            )
        return f"two sequences of one prompt; {compared}"

    def close(self) -> None:
        """Ends the worker's processes."""
        if hasattr(self, "_worker"):
            self._worker.close()

    def _prompt(self, length: int, seed: int) -> list[int]:
        """Returns arbitrary tokens; the first ids are often special."""
        size = self._worker.description.vocab_size - 10
        return [10 + (place * place * 31 + place * 17 + seed * 101) % size for place in range(length)]


def _hide_progress() -> None:
    """Keeps transformers' bars out of the lines that checks print."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _make_up(folder: Path) -> Path:
    """Writes a small model with full attention, whose weights are random and always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False,
        # Wide enough that every layer changes the result.
        initializer_range=0.1, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
