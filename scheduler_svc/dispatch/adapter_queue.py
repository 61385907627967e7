"""Requests that wait for a LoRA adapter, and the adapters that each replica has in its host's memory.

A request waits here while no replica has its adapter on the host. Adapters are loaded in the order of their
oldest requests. A full host makes room by freeing the adapter that was used least recently, of those that no
admitted request uses. The queue does no I/O: it asks replicas through callbacks, and the engine reports their
answers with :meth:`AdapterQueue.loaded` and :meth:`AdapterQueue.refused`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from protos.errors import TriptychError
from scheduler_svc.adapters.host_memory import HostMemory, LoadFailures
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class AdapterHost:
    """The memory of a replica's hosts, as the engine sees it. The callbacks return at once."""

    max_adapters: int
    """Adapters that fit, those on the device included."""
    load: Callable[[Adapter], None]
    """Starts loading an adapter on all ranks; the driver answers with :meth:`Engine.adapter_answered`."""
    unload: Callable[[int], None]
    """Frees an adapter, given its id, on all ranks; before any later load."""


@dataclass(slots=True)
class _Host:
    """One replica that runs adapters."""

    scheduler: ReplicaScheduler
    host: AdapterHost
    memory: HostMemory
    failures: LoadFailures = field(default_factory=LoadFailures)
    """Adapters that this replica could not load."""

    def load(self, adapter: Adapter) -> None:
        """Starts loading an adapter, for which there is room."""
        self.memory.begin(adapter.adapter_id)
        self.host.load(adapter)

    def drop(self, adapter_id: int) -> None:
        """Frees an adapter that no request uses."""
        self.memory.remove(adapter_id)
        self.scheduler.adapters.forget(adapter_id)
        self.host.unload(adapter_id)


class AdapterQueue:
    """Requests that wait for an adapter, by adapter, and the hosts of all replicas that run adapters."""

    def __init__(self, clock: Callable[[], float], tenants: Tenants) -> None:
        """Starts without requests and replicas.

        `clock` gives monotonic seconds; `tenants` counts the requests while they wait.
        """
        self._clock = clock
        self._hosts: dict[str, _Host] = {}
        # By adapter, then by request id.
        self._waiting: dict[int, dict[str, Request]] = {}
        self._tenants = tenants
        # Live requests by adapter, and the adapters that no new request can name.
        self._users: Counter[int] = Counter()
        self._retired: set[int] = set()
        # Adapters that left their last host since `take_orphans`.
        self._orphans: set[int] = set()
        self.may_load = False
        """Whether :meth:`load_wanted` may find something to do."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yields every waiting request, in no particular order."""
        return (request for requests in self._waiting.values() for request in requests.values())

    @property
    def max_loras(self) -> int:
        """Adapter slots of the replica that has most; 0 if no replica runs adapters."""
        return max((len(host.scheduler.adapters) for host in self._hosts.values()), default=0)

    @property
    def smallest_host(self) -> int:
        """Adapters that fit the smallest host; 0 if no replica runs adapters."""
        return min((host.host.max_adapters for host in self._hosts.values()), default=0)

    # ---- requests ----

    def add_user(self, request: Request) -> None:
        """Counts a new live request as a user of its adapter, if it has one."""
        if request.adapter is not None:
            self._users[request.adapter.adapter_id] += 1

    def remove_user(self, request: Request) -> None:
        """Ends the use of an adapter by a request that ended."""
        if request.adapter is None:
            return
        adapter_id = request.adapter.adapter_id
        self._users[adapter_id] -= 1
        if self._users[adapter_id]:
            return
        del self._users[adapter_id]
        self.may_load = True
        for host in self._hosts.values():
            host.memory.unreserve(adapter_id)

    def may_run(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica has the request's adapter on its host, or the request has none."""
        if request.adapter is None:
            return True
        host = self._hosts.get(replica_id)
        return host is not None and request.adapter.adapter_id in host.memory

    def is_expected(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica may run the request now or once it has loaded the adapter."""
        if request.adapter is None:
            return True
        host = self._hosts.get(replica_id)
        return host is not None and not host.failures.is_refused(request.adapter.adapter_id)

    def could_load(self, adapter: Adapter, num_tokens: int) -> bool:
        """Returns whether a replica large enough for so many tokens has an adapter or has not refused it."""
        return any(
            host.scheduler.kv.fits(num_tokens) and not host.failures.is_refused(adapter.adapter_id)
            for host in self._hosts.values()
        )

    def has_failed(self, request: Request) -> bool:
        """Returns whether every replica that is large enough has failed to load the request's adapter."""
        assert request.adapter is not None
        adapter_id = request.adapter.adapter_id
        fitting = [host for host in self._hosts.values() if host.scheduler.fits(request)]
        return bool(fitting) and all(
            adapter_id in host.failures and not host.memory.is_loading(adapter_id) for host in fitting
        )

    def is_paused(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica failed to load the request's adapter a short while ago."""
        host = self._hosts.get(replica_id)
        if request.adapter is None or host is None:
            return False
        return host.failures.excludes(request.adapter.adapter_id, self._clock())

    def hold(self, request: Request) -> bool:
        """Enqueues a live request until a replica has its adapter.

        Returns:
            False if the request has no adapter, or some replica has it: the request need not wait here.
        """
        if request.adapter is None or self._is_on_a_host(request.adapter.adapter_id):
            return False
        request.state = RequestState.WAITING_FOR_ADAPTER
        self._waiting.setdefault(request.adapter.adapter_id, {})[request.request_id] = request
        self._tenants.add(request)
        self.may_load = True
        return True

    def remove(self, request: Request) -> bool:
        """Removes a request; returns False if it does not wait here."""
        adapter_id = 0 if request.adapter is None else request.adapter.adapter_id
        requests = self._waiting.get(adapter_id, {})
        if requests.pop(request.request_id, None) is None:
            return False
        if not requests:
            del self._waiting[adapter_id]
        self._tenants.remove(request)
        return True

    def used(self, request: Request, replica_id: str) -> None:
        """Notes that a request was admitted to a replica."""
        if request.adapter is not None:
            adapter_id = request.adapter.adapter_id
            self._hosts[replica_id].memory.used(adapter_id)
            for host in self._hosts.values():
                host.memory.unreserve(adapter_id)

    # ---- loading ----

    def load_wanted(self) -> None:
        """Starts loading the adapters that requests wait for, as far as there is room.

        An adapter that finds none claims a slot of a device: when it is free, the adapter in it can leave.
        """
        self.may_load = False
        self._free_retired()
        oldest = [min(each.values(), key=_rank) for each in self._waiting.values()]
        for request in sorted(oldest, key=_rank):
            adapter = request.adapter
            assert adapter is not None
            if any(host.memory.is_loading(adapter.adapter_id) for host in self._hosts.values()):
                continue
            hosts = self._hosts_for(request) or self._hosts_for(request, even_paused=True)
            chosen = next((host for host in hosts if self._make_room(host)), None)
            if chosen is not None:
                chosen.load(adapter)
            elif hosts:
                hosts[0].scheduler.adapters.claim(adapter.adapter_id, request.rank)

    def spread(self, request: Request) -> None:
        """Has the adapter of a request that found no room loaded on another replica that has some."""
        adapter = request.adapter
        if adapter is None or any(one.memory.is_loading(adapter.adapter_id) for one in self._hosts.values()):
            return
        for host in self._hosts_for(request) or self._hosts_for(request, even_paused=True):
            free = host.scheduler.has_free_slot and adapter.adapter_id not in host.memory
            if free and self._make_room(host, only_unwanted=True):
                host.load(adapter)
                return

    def _hosts_for(self, request: Request, *, even_paused: bool = False) -> list[_Host]:
        """Returns the hosts that may load a request's adapter, the best first."""
        assert request.adapter is not None
        adapter_id, now_s = request.adapter.adapter_id, self._clock()

        def may_load(host: _Host) -> bool:
            if even_paused:
                return not host.failures.is_refused(adapter_id)
            return not host.failures.excludes(adapter_id, now_s)

        hosts = [host for host in self._hosts.values() if may_load(host) and host.scheduler.fits(request)]
        return sorted(
            hosts,
            key=lambda host: (
                not host.scheduler.has_free_slot,
                not host.memory.has_room,
                host.scheduler.num_running,
            ),
        )

    def _make_room(self, host: _Host, *, only_unwanted: bool = False) -> bool:
        """Frees an adapter of a full host; returns whether there is room."""
        if host.memory.has_room:
            return True
        free = [one for one in host.memory.evictable() if host.scheduler.adapters.may_leave_host(one)]
        unwanted = [one for one in free if one not in self._users]
        victims = unwanted or ([] if only_unwanted else free)
        if not victims:
            return False
        self._evict(host, victims[0])
        host.scheduler.stats.adapter_evictions += 1
        return True

    def _evict(self, host: _Host, adapter_id: int) -> None:
        host.drop(adapter_id)
        if adapter_id in self._users and not self._is_on_a_host(adapter_id):
            self._orphans.add(adapter_id)
            self.may_load = True

    def _is_on_a_host(self, adapter_id: int) -> bool:
        return any(adapter_id in host.memory for host in self._hosts.values())

    def take_orphans(self) -> set[int]:
        """Returns the adapters with live requests that have left their last host since the last call."""
        orphans, self._orphans = self._orphans, set()
        return orphans

    def loaded(self, replica_id: str, adapter_id: int) -> list[Request]:
        """Records that a replica has an adapter; removes and returns the requests that waited for it."""
        host = self._hosts.get(replica_id)
        if host is None:
            return []
        host.memory.loaded(adapter_id, reserve=adapter_id in self._waiting)
        host.failures.forget(adapter_id)
        host.scheduler.stats.adapter_loads += 1
        self.may_load = True
        return self._release(adapter_id)

    def refused(
        self, replica_id: str, adapter_id: int, error: TriptychError
    ) -> tuple[list[Request], TriptychError]:
        """Records that a replica could not load an adapter, and why.

        Removes the requests that waited for it, unless another replica has not failed to load it or is trying
        again. The next request tries again everywhere.

        Returns:
            The removed requests, and why they fail: an error that may pass, if some replica has one.
        """
        if (host := self._hosts.get(replica_id)) is not None:
            host.memory.failed(adapter_id)
            host.failures.add(adapter_id, error, self._clock())
        self.may_load = True
        if any(
            adapter_id not in host.failures or host.memory.is_loading(adapter_id)
            for host in self._hosts.values()
        ):
            return [], error
        errors = [host.failures.error(adapter_id) for host in self._hosts.values()]
        self._forget_failures(adapter_id)
        return self._release(adapter_id), next((one for one in errors if one.retryable), error)

    def _forget_failures(self, adapter_id: int) -> None:
        for host in self._hosts.values():
            host.failures.forget(adapter_id)

    def discard(self, replica_id: str, adapter_id: int) -> None:
        """Frees what a replica has loaded under an adapter's id, because it is something else."""
        if (host := self._hosts.get(replica_id)) is not None:
            host.host.unload(adapter_id)

    def _release(self, adapter_id: int) -> list[Request]:
        return [one for one in list(self._waiting.get(adapter_id, {}).values()) if self.remove(one)]

    # ---- adapters and replicas ----

    def introduce(self, adapter: Adapter) -> list[str]:
        """Starts loading a new adapter on every replica that has, or can make, room; returns their ids."""
        asked = [name for name, host in self._hosts.items() if self._make_room(host)]
        for name in asked:
            self._hosts[name].load(adapter)
        return asked

    def retire(self, adapter_id: int) -> None:
        """Frees an adapter that no new request can name, once its last request has ended."""
        self._retired.add(adapter_id)
        self.may_load = True

    def _free_retired(self) -> None:
        for adapter_id in [one for one in self._retired if one not in self._users]:
            hosts = [host for host in self._hosts.values() if adapter_id in host.memory]
            for host in hosts:
                if host.scheduler.adapters.may_leave_host(adapter_id):
                    host.drop(adapter_id)
            if not any(
                adapter_id in host.memory or host.memory.is_loading(adapter_id)
                for host in self._hosts.values()
            ):
                self._retired.discard(adapter_id)
                self._forget_failures(adapter_id)

    def holders(self, adapter_id: int) -> list[str]:
        """Returns the ids of the replicas that have the adapter on their host."""
        return [name for name, host in self._hosts.items() if adapter_id in host.memory]

    def attach(
        self, replica_id: str, scheduler: ReplicaScheduler, lora: AdapterHost | None, adapters: Iterable[Adapter]
    ) -> None:  # fmt: skip
        """Adds a replica, which loads as many of the registered `adapters` as it has room for."""
        if lora is None:
            return
        host = self._hosts[replica_id] = _Host(scheduler, lora, HostMemory(lora.max_adapters))
        self.may_load = True
        for adapter in adapters:
            if host.memory.has_room:
                host.load(adapter)

    def detach(self, replica_id: str) -> None:
        """Removes a lost replica, and with it what was on its host."""
        lost = self._hosts.pop(replica_id, None)
        if lost is None:
            return
        self.may_load = True
        self._orphans.update(one for one in self._users if one in lost.memory and not self._is_on_a_host(one))


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
