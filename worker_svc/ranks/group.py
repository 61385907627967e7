"""The process group of a replica's ranks: its channels, and its agreement on flags, packages and devices."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from protos.errors import ConfigurationRefused, Unavailable
from protos.service.logs import get_logger
from worker_svc.ranks import operators
from worker_svc.ranks.layout import RankLayout

# Most messages fit into one transfer of this size, length included.
_INLINE = 1024
_LENGTH = 8


class Channel:
    """Carries messages from a rank to the other members of a process group, in order.

    A single thread at a time uses each end. Gloo returns from a send once the message is under way.
    """

    def __init__(self, group: Any, source: int) -> None:
        """Uses a gloo group that belongs to this channel only; the global rank `source` sends."""
        self._group = group
        self._source = source
        self._frame = torch.zeros(_INLINE, dtype=torch.uint8)

    def send(self, message: bytes) -> None:
        """Sends a message. Only the source may call it.

        Raises:
            RuntimeError: if a member is lost.
        """
        head = len(message).to_bytes(_LENGTH, "little") + message[: _INLINE - _LENGTH]
        self._frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        distributed.broadcast(self._frame, self._source, group=self._group)
        if rest := message[_INLINE - _LENGTH :]:
            distributed.broadcast(
                torch.frombuffer(bytearray(rest), dtype=torch.uint8), self._source, group=self._group
            )

    def receive(self) -> bytes:
        """Waits for the next message and returns it.

        Raises:
            RuntimeError: if the source is lost.
        """
        distributed.broadcast(self._frame, self._source, group=self._group)
        frame = self._frame.numpy().tobytes()
        length = int.from_bytes(frame[:_LENGTH], "little")
        inline = frame[_LENGTH : _LENGTH + length]
        if length <= _INLINE - _LENGTH:
            return inline
        rest = torch.empty(length - len(inline), dtype=torch.uint8)
        distributed.broadcast(rest, self._source, group=self._group)
        return inline + rest.numpy().tobytes()


# Hidden states on their way to the next stage, each in its own memory.
_SENDS_IN_FLIGHT = 2


class Links:
    """Connects each rank with its successor, the rank of the same place in the next stage."""

    def __init__(
        self,
        layout: RankLayout,
        devices: Sequence[str],
        backend: str,
        make_group: Callable[[Sequence[int], str], Any],
    ) -> None:
        """Creates the process groups, on all ranks of the replica in the same order.

        `devices` has the identity of each rank's device; empty if ranks may share it.
        """
        self._layout = layout
        self._groups: dict[int, Any] = {}
        self._over_host: set[int] = set()
        for source in range(layout.world_size - layout.tensor):
            target = source + layout.tensor
            # NCCL does not connect a GPU with itself.
            shared = bool(devices[source]) and devices[source] == devices[target]
            self._groups[source] = make_group((source, target), "gloo" if shared else backend)
            if shared:
                self._over_host.add(source)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()

    def connect(self, device: torch.device) -> None:
        """Sends something over each link: NCCL connects GPUs, and takes memory for it, on first use.

        All ranks must call it.
        """
        token = torch.zeros(1).to(device)  # an NPU fills nothing outside of graphs
        if not self._layout.is_first_stage:
            self.receive(token)
        if not self._layout.is_last_stage:
            self.send(token)

    def send(self, states: torch.Tensor) -> None:
        """Sends hidden states to the next stage, without waiting until it takes them."""
        source = self._layout.rank
        # The memory of a graph's result is overwritten by its next run.
        kept = states.to("cpu", copy=True) if source in self._over_host else states.contiguous().clone()
        sending = distributed.isend(kept, source + self._layout.tensor, group=self._groups[source])
        self._sending.append((sending, kept))
        if len(self._sending) > _SENDS_IN_FLIGHT:
            self._sending.popleft()[0].wait()

    def receive(self, states: torch.Tensor) -> torch.Tensor:
        """Receives hidden states from the stage before into a tensor of their shape. Returns it."""
        source = self._layout.rank - self._layout.tensor
        if source not in self._over_host:
            distributed.recv(states, source, group=self._groups[source])
            return states
        carried = torch.empty_like(states, device="cpu")
        distributed.recv(carried, source, group=self._groups[source])
        return states.copy_(carried)


def refuse_differences(facts: Sequence[Mapping[str, str]]) -> None:
    """Compares all ranks' facts with rank 0's; all ranks find the same difference.

    Raises:
        ConfigurationRefused: names the first difference and its ranks.
    """
    for key in sorted(set().union(*facts)):
        values = [each.get(key, "none") for each in facts]
        other = next((value for value in values if value != values[0]), None)
        if other is None:
            continue
        having, differing = (_ranks(values, value) for value in (values[0], other))
        raise ConfigurationRefused(
            f"{having} of the replica {_verb(having)} {key} {values[0]} and {differing} {_verb(differing)} {other};"
            " start all ranks with the same flags, packages and kind of device"
        )


def _ranks(values: Sequence[str], value: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(values) if each == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _verb(ranks: str) -> str:
    return "have" if ranks.startswith("ranks") else "has"


# Ranks are configured at the same time, but one may still be releasing an earlier configuration.
_JOIN_S = 120.0
_RETRY_S = 0.1
# A rank may be idle for any time. The scheduler finds out about lost ranks, not a timeout.
_FOREVER = timedelta(days=365)
_NO_FACTS: Mapping[str, str] = MappingProxyType({})


class RankGroup:
    """The joined ranks of a replica.

    All ranks create it at the same time. A single thread at a time uses each channel and each process group.
    """

    def __init__(
        self,
        layout: RankLayout,
        device: torch.device,
        *,
        master: str,
        epoch: str,
        default: str = "gloo",
        collectives: str = "gloo",
        compiled: bool = False,
        identity: str = "",
        facts: Mapping[str, str] = _NO_FACTS,
    ) -> None:
        """Joins the group; waits for all ranks.

        Args:
            layout: this rank's place.
            device: the place of hidden states between stages.
            master: host:port where rank 0 listens for the others. Empty for a lone rank that compiles its
            graphs: collectives then return at once, as if the others sent this rank's data.
            epoch: name of this forming of the group. Ranks of different epochs never meet.
            default: the backend of the default process group.
            collectives: the backend that joins the tensors of a stage.
            compiled: whether the device's own compiler compiles the collectives.
            identity: the device's unique identity; empty if the ranks of a stage may share it.
            facts: by name, the facts that must agree on all ranks.

        Raises:
            Unavailable: if the ranks do not find one another.
            ConfigurationRefused: on all ranks, if facts differ, or two ranks of a stage share a device and
                may not.
        """
        self.layout = layout
        self.epoch = epoch
        host = link = "fake"
        if master:
            host, link = "gloo", distributed.get_default_backend_for_device(device)
        _meet(layout, default if master else "fake", master, epoch)
        everyone = tuple(range(layout.world_size))
        self._exchange = _group(everyone, host)
        devices = self._agree(facts, identity) if master else [""] * len(everyone)
        self.plans = Channel(_group(everyone, host), 0)
        """From rank 0: the steps, in the order in which all ranks run them."""
        for stage in range(layout.pipeline):
            group = _group(layout.ranks_of(stage), collectives if master else "fake")
            if stage == layout.stage:
                operators.use_group(group, device, compiled=compiled)
                self.stage = {} if group is None else {str(group.group_name): layout.peers}
                """By the name of this stage's process group, its ranks; empty for a single rank."""
        last = layout.ranks_of(layout.pipeline - 1)
        self.choices = Channel(_group(last, host), layout.chooser)
        """From the chooser to its stage: tokens that ranks cannot choose alike."""
        earlier = tuple(rank for rank in everyone if rank not in last)
        self.results = Channel(_group((*earlier, layout.chooser), host), layout.chooser)
        """From the chooser to all other stages: the result of each step."""
        self.links = Links(layout, devices, link, _group)
        """Carry hidden states between stages."""
        if master:
            self.links.connect(device)

    def _agree(self, facts: Mapping[str, str], identity: str) -> list[str]:
        try:
            refuse_differences([json.loads(each) for each in self.exchange(json.dumps(dict(facts)).encode())])
            devices = [each.decode() for each in self.exchange(identity.encode())]
            _refuse_shared_devices(self.layout, devices)
        except ConfigurationRefused:
            # The threads of an open group may abort the process when it exits: its code would not be 2.
            distributed.destroy_process_group()
            raise
        return devices

    def exchange(self, value: bytes) -> list[bytes]:
        """Returns the values of all ranks, in their order. All ranks must call it."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.layout.world_size)]
        distributed.all_gather(lengths, torch.tensor([len(value)]), group=self._exchange)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(value.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        values = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(values, padded, group=self._exchange)
        return [
            bytes(each.numpy().tobytes()[: int(length)]) for each, length in zip(values, lengths, strict=True)
        ]


def _refuse_shared_devices(layout: RankLayout, devices: Sequence[str]) -> None:
    """Refuses ranks of a stage with the same device; all ranks find the same."""
    for stage in range(layout.pipeline):
        first: dict[str, int] = {}
        for rank in layout.ranks_of(stage):
            if devices[rank] and (other := first.setdefault(devices[rank], rank)) != rank:
                raise ConfigurationRefused(
                    f"ranks {other} and {rank} of the replica have the same GPU, and each needs its own;"
                    " make more GPUs visible, or set --local-rank"
                )


def _meet(layout: RankLayout, backend: str, master: str, epoch: str) -> None:
    if master:
        others = [rank for rank in range(layout.world_size) if rank != layout.rank]
        get_logger().info("joining", rank=layout.rank, master=master, waits_for_ranks=others, limit_s=_JOIN_S)
    deadline = time.monotonic() + _JOIN_S
    try:
        store = PrefixStore(epoch, _open_store(layout, master)) if master else _no_store()
        if master:
            # Not every backend waits for the others, or reports their absence.
            store.set(f"joining/{layout.rank}", "")
            everyone = [f"joining/{rank}" for rank in range(layout.world_size)]
            store.wait(everyone, timedelta(seconds=_JOIN_S))
        distributed.init_process_group(
            backend, store=store, rank=layout.rank, world_size=layout.world_size,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Unavailable(
            f"the ranks of the replica do not meet at {master} within {_JOIN_S:g} s: {reason}"
        ) from error


def _open_store(layout: RankLayout, master: str) -> Any:
    """Opens rank 0's store, or connects to it. A predecessor of rank 0 may hold the port for a moment."""
    host, _, port = master.rpartition(":")
    deadline, is_retry = time.monotonic() + _JOIN_S, False
    while True:
        try:
            return TCPStore(
                host.strip("[]"), int(port), is_master=layout.leads, wait_for_workers=False,
                timeout=timedelta(seconds=_JOIN_S),
            )  # fmt: skip
        except RuntimeError as error:
            if time.monotonic() > deadline or not layout.leads:
                raise
            if not is_retry:
                reason = str(error).strip().splitlines()[0]
                get_logger().warning("master_not_free", master=master, reason=reason, retry_s=_JOIN_S)
            is_retry = True
            time.sleep(_RETRY_S)


def _no_store() -> Any:
    """Returns the store of a rank that is alone. The import registers PyTorch's backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _group(ranks: Sequence[int], backend: str) -> Any:
    """Creates a process group, on all ranks of the replica in the same order; `None` for a lone rank."""
    if len(ranks) == 1:
        return None
    return distributed.new_group(list(ranks), backend=backend, timeout=_FOREVER)
