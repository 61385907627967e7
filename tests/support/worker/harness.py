"""Drives a runner without a scheduler: allocates blocks, prefills in chunks, decodes in one batch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from protos.steps import Admission, Decode, GroupKind, Prefill, SlotOutput, StepPlan
from protos.triptych.v1 import common_pb2
from scheduler_svc.shapes.buckets import chunk_for
from tests.support.sampling_params import sampling_params
from worker_svc.devices import open_device
from worker_svc.devices.base import Device
from worker_svc.devices.registry import DeviceName
from worker_svc.execution.kv_cache import count_blocks
from worker_svc.execution.runner import Runner
from worker_svc.grammars.constraints import Constraints
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.lora.checkpoint import LoraLimits
from worker_svc.lora.store import AdapterStore
from worker_svc.ranks.layout import RankLayout
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.settings import Backend
from worker_svc.shapes import ShapeConfig, group_layers
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.configuration import Dtype
from worker_svc.vllm_adapter.model import VllmModel

GREEDY = sampling_params(temperature=0.0)
_MODELS: dict[tuple[Path, Dtype, bool, LoraLimits | None], VllmModel] = {}


def load(
    folder: Path,
    dtype: Dtype,
    device_name: DeviceName = "cpu",
    device: Device | None = None,
    *,
    compiled: bool = True,
    language_model_only: bool = False,
    lora: LoraLimits | None = None,
) -> VllmModel:
    """Returns a model with its weights, loaded once per process.

    It runs on one thread: threads that wait for each other are slow when other processes compete for the
    cores.
    """
    torch.set_num_threads(1)
    device = device or open_device(device_name)
    key = folder, dtype, compiled, lora
    if key in _MODELS:
        _forget_ranks()
    if key not in _MODELS:
        startup.prepare(device.name)
        model = VllmModel(
            folder,
            device,
            dtype=dtype,
            seed=0,
            compiled=compiled,
            language_model_only=language_model_only,
            lora=lora,
        )
        model.load_weights()
        _MODELS[key] = model
    return _MODELS[key]


def random_prompt(seed: int, length: int) -> list[int]:
    """Returns token ids that every real model has."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(100, 40_000, (length,), generator=generator).tolist()
    return ids


def _forget_ranks() -> None:
    """Sets vLLM's groups for one rank: another test in this process may have built one of several."""
    # Not earlier: it imports vLLM.
    from worker_svc.vllm_adapter.building import set_groups

    set_groups(RankLayout())


class Harness:
    """A runner and a trivial allocator that hands out each block once."""

    def __init__(
        self,
        model: VllmModel,
        *,
        max_model_len: int = 1024,
        max_num_seqs: int = 32,
        chunk: int = 128,
        block_size: int = 128,
        decode_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
        device_name: DeviceName = "cpu",
        device: Device | None = None,
        window_kind: GroupKind = GroupKind.PAGED_WINDOW,
        backend: Backend = "compiled",
        level: int | None = None,
        warm: bool = True,
        constraints: Constraints | None = None,
        prefill_buckets: tuple[int, ...] = (),
    ) -> None:
        device = device or open_device(device_name)
        self.groups = group_layers(model.description.layers, window_kind)
        sizes = ShapeConfig(max_model_len, max_num_seqs, chunk, block_size, decode_buckets)
        blocks = 1 + max_num_seqs * sizes.table_width
        self.shapes = ShapeConfig(
            max_model_len, max_num_seqs, chunk, block_size, decode_buckets, (blocks,) * len(self.groups),
            prefill_buckets=prefill_buckets,
        )  # fmt: skip
        assert count_blocks(self.groups, self.shapes, 1 << 34)
        chosen = (device.default_level if level is None else level) if backend == "compiled" else 0
        options = GraphOptions(level=chosen, required=True, strict=warm)
        adapted = model.adapted
        self.adapters = None if adapted is None else AdapterStore(adapted.limits, adapted)
        vocabulary = SamplingVocabulary(model.description.vocab_size, model.description.eos_token_ids)
        self.runner = Runner(
            model,
            device,
            self.groups,
            self.shapes,
            vocabulary=vocabulary,
            options=options,
            constraints=constraints,
            adapters=self.adapters,
        )
        if warm:
            self.runner.make_graphs(lambda *_: None)
        self.runner.graphs.finish_warm_up(made_all=True)
        self._next_block = 1
        self._step = 0
        self.lengths: dict[int, int] = {}
        """The number of computed tokens, by slot."""

    def load_adapter(self, adapter_id: int, folder: Path) -> None:
        """Loads an adapter into the host's memory."""
        assert self.adapters is not None
        self.adapters.reserve(adapter_id)
        self.adapters.load(adapter_id, folder.name, str(folder))

    def run(self, **fields: object) -> list[SlotOutput]:
        """Executes one plan."""
        self._step += 1
        return self.runner.execute(StepPlan(self._step, **fields))  # type: ignore[arg-type]

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],
        sampling: common_pb2.SamplingParams = GREEDY,
        computed: int = 0,
        **fields: Any,
    ) -> Admission:
        """Returns a request with blocks for `max_model_len` tokens; its in-place block is slot + 1."""
        width = self.shapes.table_width
        ids = range(self._next_block, self._next_block + width)
        assert ids.stop <= self.shapes.num_blocks[0]
        self._next_block += width
        self.lengths[slot] = computed
        blocks = {
            group.group_id: (1 + slot,) if group.kind is GroupKind.IN_PLACE_WINDOW else ids
            for group in self.groups
        }
        return Admission(slot, token_ids, computed, sampling, blocks, **fields)

    def prefill(
        self,
        slot: int,
        token_ids: Sequence[int],
        sampling: common_pb2.SamplingParams = GREEDY,
        starts: Sequence[int] = (),
        **fields: Any,
    ) -> SlotOutput:
        """Admits a request and runs its chunks, which begin at `starts`, or are whole but the last.

        Returns its first token with all prompt log-probabilities.
        """
        admission = [self.admit(slot, token_ids, sampling, **fields)]
        outputs: list[SlotOutput] = []
        prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        bounds = [*(starts or range(0, len(token_ids), self.shapes.chunk)), len(token_ids)]
        for start, end in itertools.pairwise(bounds):
            last = end == len(token_ids)
            bucket = chunk_for(end - start, self.shapes.chunk_sizes)
            outputs = self.run(admit=admission, work=Prefill(slot, start, end - start, last, bucket))
            admission = []
            prompt_logprobs += [entry for each in outputs for entry in each.prompt_logprobs]
        self.lengths[slot] = len(token_ids)
        (output,) = outputs
        return replace(output, prompt_logprobs=prompt_logprobs)

    def decode(self, slots: Sequence[int], bucket: int | None = None) -> list[SlotOutput]:
        """Decodes one token for each slot."""
        size = bucket or next(size for size in self.shapes.decode_buckets if size >= len(slots))
        outputs = self.run(work=Decode(slots, size))
        for slot in slots:
            self.lengths[slot] += 1
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        sampling: common_pb2.SamplingParams | Sequence[common_pb2.SamplingParams] = GREEDY,
    ) -> list[list[SlotOutput]]:
        """Generates `num_tokens` tokens for each prompt in one decode batch, then frees the slots."""
        each = [sampling] * len(prompts) if isinstance(sampling, common_pb2.SamplingParams) else sampling
        results = [[self.prefill(slot, prompt, each[slot])] for slot, prompt in enumerate(prompts)]
        slots = range(len(prompts))
        for _ in range(num_tokens - 1):
            for result, output in zip(results, self.decode(slots), strict=True):
                result.append(output)
        self.release(slots)
        return results

    def release(self, slots: Sequence[int]) -> None:
        """Frees all slots in use, and with them all blocks."""
        self.run(release=slots)
        self._next_block = 1


def tokens_of(outputs: Sequence[SlotOutput]) -> list[int]:
    """Returns all token ids in order."""
    return [token for output in outputs for token in output.token_ids]
