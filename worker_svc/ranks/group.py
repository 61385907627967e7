"""The process group of a replica's ranks, and their agreement on flags, packages and devices."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from protos.errors import ConfigurationRefused, Unavailable
from protos.service.logs import get_logger
from worker_svc.ranks import operators
from worker_svc.ranks.channels import Channel, Links
from worker_svc.ranks.layout import RankLayout


def refuse_differences(facts: Sequence[Mapping[str, str]]) -> None:
    """Compares all ranks' facts with rank 0's; all ranks find the same difference.

    Args:
        facts: by rank, the facts that must agree.

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
        collectives: str = "gloo",
        compiled: bool = False,
        identity: str = "",
        facts: Mapping[str, str] = _NO_FACTS,
    ) -> None:
        """Joins the group; waits for all ranks.

        Args:
            layout: this rank's place.
            device: the place of the batch, and of hidden states between stages.
            master: host:port where rank 0 listens for the others. Empty for a lone rank that compiles its
            graphs: collectives then return at once, as if the others sent this rank's data.
            epoch: name of this forming of the group. Ranks of different epochs never meet.
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
        _meet(layout, host, master, epoch)
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
    try:
        store = PrefixStore(epoch, _open_store(layout, master)) if master else _no_store()
        distributed.init_process_group(
            backend, store=store, rank=layout.rank, world_size=layout.world_size,
            timeout=timedelta(seconds=_JOIN_S),
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
