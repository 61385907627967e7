"""The protocol of scheduler, workers and clients, with losses and crashes at any point.

The schedulers and the engine are the real ones. Workers are models that keep what each block holds. After
every rule, each indexed block and each kept window must hold its prefix: a late write never reaches one.
"""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.errors import InvalidArgument
from protos.limits import SAMPLING
from protos.steps import GroupKind
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, ChunkStarts, KvCache, hit_unit
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits, Resumed
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup
from tests.support.property_settings import machine
from tests.support.scheduler.factories import EOS, FULL, make_shapes, make_submission
from tests.support.scheduler.protocol_model import Client, KnownPrefixes, ModelWorker, Stream
from tests.support.scheduler.simulated_device import Moment, SimulatedDevice

pytestmark = pytest.mark.property

MAX_LEN = 40
# Requests never fail here for the workers that they lose.
NEVER = 1000

KINDS = (FULL, KvGroup(GroupKind.PAGED_WINDOW, 3), KvGroup(GroupKind.IN_PLACE_WINDOW, 4))
workers = st.integers(0, 1)


def root_of(sequence_id: str) -> str:
    """Returns the name of the client whose request a sequence belongs to."""
    return sequence_id.partition("#")[0].partition(".")[0]


class Replica:
    """The scheduler's side of one Execute stream: an epoch of one worker."""

    def __init__(self, scheduler: ReplicaScheduler, stream: Stream) -> None:
        self.scheduler = scheduler
        self.stream = stream

    def send(self) -> None:
        """Sends what the step loop would send now."""
        while (plan := self.scheduler.next_plan()) is not None:
            self.stream.plans.append(plan)

    def deliver(self) -> None:
        """Reads one result, if one has arrived."""
        if self.stream.results:
            self.scheduler.update(self.stream.results.popleft())


class ProtocolMachine(RuleBasedStateMachine):
    """Two workers, one scheduler and many clients; any of them breaks at any time."""

    @initialize(
        chunk=st.sampled_from([2, 4, 8]), block=st.sampled_from([4, 8]), num_blocks=st.integers(12, 30),
        groups=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), generated=st.booleans(),
        lease=st.sampled_from([1, 3, 9]), jump=st.sampled_from([0, 0, 3]), depth=st.sampled_from([1, 2, 3]),
        runs_ahead=st.booleans(), reporting=st.sampled_from([0, 1, 2]),
        starts=st.sampled_from(["anywhere", "exact"]), finest=st.sampled_from([1, 2, 4]), collects=st.booleans(),
    )  # fmt: skip
    def start(
        self, chunk: int, block: int, num_blocks: int, groups: list[KvGroup], generated: bool, lease: int, jump: int,
        depth: int, runs_ahead: bool, reporting: int, starts: ChunkStarts = "exact", finest: int = 2,
        collects: bool = False,
    ) -> None:  # fmt: skip
        self.shapes = make_shapes(max_model_len=MAX_LEN, chunk=chunk, block_size=block)
        self.shapes.check(DeviceLimits(MAX_LEN, 1, 4, 8), groups)
        self.num_blocks, self.groups, self.lease, self.jump = num_blocks, groups, lease, jump
        self.depth, self.runs_ahead, self.reporting = depth, runs_ahead, reporting
        # Whether workers collect the tokens of all steps of a plan in one result.
        self.collects = collects
        # Requests whose admission workers refuse, from how many computed tokens on.
        self.refused: dict[str, int] = {}
        self.options = CacheOptions(cache_generated=generated, chunk_starts=starts, finest_hit=finest)
        self.known = KnownPrefixes(self.new_cache().prefixes.hash_block_size)
        self.clients: list[Client] = []
        self.workers = [self.new_worker() for _ in range(2)]
        self.replicas: dict[int, Replica] = {}
        self.new_engine()

    # ---- what the processes do ----

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 1, 2]), salt=st.sampled_from(["", "", "a"]), stop_at=st.sampled_from([None, None, 0, 3]),
        refused=st.sampled_from([None, None, None, 0, 4]),
    )  # fmt: skip
    def submit(
        self, prompt: list[int], max_tokens: int, n: int, salt: str, stop_at: int | None, refused: int | None
    ) -> None:
        kv = self.new_cache()
        if len(prompt) + max_tokens > kv.max_tokens(MAX_LEN):
            return
        client = Client(
            f"r{len(self.clients)}", prompt, max_tokens, n, salt, stop_at, may_fail=refused is not None
        )
        if refused is not None:
            self.refused[client.name] = refused
        self.clients.append(client)
        self.known.add(client)
        self.ask(client)

    @rule(index=workers)
    def send(self, index: int) -> None:
        self.engine.dispatch()
        if (replica := self.replicas.get(index)) is not None:
            replica.send()

    @rule(index=workers)
    def worker_reads(self, index: int) -> None:
        self.workers[index].read()

    @rule(index=workers, steps=st.integers(1, 4))
    def worker_runs(self, index: int, steps: int) -> None:
        for _ in range(steps):
            self.workers[index].run()

    @rule(index=workers, results=st.integers(1, 4))
    def deliver(self, index: int, results: int) -> None:
        for _ in range(results):
            if (replica := self.replicas.get(index)) is not None:
                replica.deliver()

    @rule(rounds=st.integers(1, 12))
    def all_work(self, rounds: int) -> None:
        for _ in range(rounds):
            for index, worker in enumerate(self.workers):
                self.send(index)
                worker.read()
                worker.run()
                self.deliver(index, 1)

    @rule(count=st.integers(1, 5))
    def clients_read(self, count: int) -> None:
        for client in self.clients:
            client.read(count)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients), label="client")
        client.aborted = True
        self.engine.abort(client.wire_id)

    # ---- what breaks ----

    @rule(index=workers)
    def step_fails(self, index: int) -> None:
        # Two failures in a row of a request that runs alone would be its own.
        unread = any(result.error for replica in self.replicas.values() for result in replica.stream.results)
        if not unread and not any(request.suspect for request in self.engine.live()):
            self.workers[index].run(fails=True)

    @rule(index=workers, loss=st.sampled_from([Loss.DIED, Loss.HUNG, Loss.LEFT]))
    def worker_dies(self, index: int, loss: Loss) -> None:
        self.lose(index, loss)
        self.workers[index].die()
        self.workers[index] = self.new_worker()

    @precondition(lambda self: self.replicas)
    @rule(index=workers, arrived=st.integers(0, 2), running=st.booleans(), delivered=st.integers(0, 3))
    def stream_breaks(self, index: int, arrived: int, running: bool, delivered: int) -> None:
        self.deliver(index, delivered)
        self.lose(index, Loss.CUT_OFF)
        if self.workers[index].stream is not None:
            self.workers[index].break_stream(arrived=arrived, running=running)

    @rule(index=workers)
    def worker_registers(self, index: int) -> None:
        if index not in self.replicas:
            self.attach(index)

    @rule(received=st.integers(0, 4), arrived=st.integers(0, 2), running=st.booleans())
    def scheduler_dies(self, received: int, arrived: int, running: bool) -> None:
        """Clients receive some of the events that are under way, and ask the next scheduler for the rest."""
        self.replicas.clear()
        for worker in self.workers:
            if worker.stream is not None:
                worker.break_stream(arrived=arrived, running=running)
        for client in self.clients:
            client.read(received)
            client.sink.events.clear()
        self.new_engine()
        for client in self.clients:
            if client.aborted:
                client.ended.update(range(client.n))  # its client is gone
            elif not client.complete:
                self.ask(client)

    # ---- what must hold ----

    @invariant()
    def pools_are_sound(self) -> None:
        for replica in getattr(self, "replicas", {}).values():
            replica.scheduler.kv.check_integrity()

    @invariant()
    def late_writes_reach_no_prefix(self) -> None:
        for index, replica in getattr(self, "replicas", {}).items():
            assert not list(self.known.faults(replica.scheduler.kv, self.workers[index].device))

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        try:
            self.end()
        finally:
            for worker in self.workers:
                worker.die()

    def end(self) -> None:
        """Lets all requests finish, and checks that nothing is left."""
        for index in range(len(self.workers)):
            self.worker_registers(index)
        for _ in range(400):
            if all(client.complete for client in self.clients):
                break
            self.all_work(12)
            self.clients_read(100)
            self.late_writes_reach_no_prefix()
        assert all(client.complete for client in self.clients), "a request is stuck"
        self.all_work(12)
        assert not self.engine.live()
        for replica in self.replicas.values():
            assert not replica.scheduler.is_busy
            for group in replica.scheduler.kv.groups:
                assert group.pool.num_free == group.pool.num_blocks, "blocks leaked"

    # ---- parts ----

    def new_worker(self) -> ModelWorker:
        device = SimulatedDevice(self.shapes, self.groups, hit_unit(self.shapes, self.groups, self.options))
        device.jump = self.jump
        device.refuses = self.refusal
        device.reports = lambda name: self.reporting > 0 and int(root_of(name)[1:]) % self.reporting == 0
        return ModelWorker(device, runs_ahead=self.runs_ahead)

    def refusal(self, moment: Moment) -> InvalidArgument | None:
        refused = moment.end >= self.refused.get(root_of(moment.request_id), 1000)
        return InvalidArgument("refused") if refused else None

    def new_cache(self) -> KvCache:
        return KvCache(
            self.shapes, self.groups, [self.num_blocks] * len(self.groups), model="m", options=self.options
        )

    def new_engine(self) -> None:
        self.engine = Engine(
            max_waiting=NEVER, max_waiting_tokens=100_000, clock=lambda: 0.0, order=PriorityFairOrder(),
            max_worker_losses=NEVER,
        )  # fmt: skip
        self.engine.model = ModelLimits(MAX_LEN, 97, frozenset(SAMPLING), 5, frozenset({EOS}))
        for index in range(len(self.workers)):
            self.attach(index)

    def attach(self, index: int) -> None:
        """Opens a stream to a worker; the replica behind it is a new one."""
        scheduler = ReplicaScheduler(
            self.shapes,
            self.new_cache(),
            self.engine,
            Turns(1),
            clock=lambda: 0.0,
            lease_steps=self.lease,
            depth=self.depth,
            event_interval_s=1e9 if self.collects else 0.0,
        )
        scheduler.stats.times.decode.observe(1, 1e-6)  # steps of unknown time are never collected
        self.replicas[index] = Replica(scheduler, self.workers[index].open())
        self.engine.attach(f"replica-{index}", AttachedReplica(scheduler, lambda: None))

    def lose(self, index: int, loss: Loss) -> None:
        self.replicas.pop(index, None)
        self.engine.detach(f"replica-{index}", loss)

    def ask(self, client: Client) -> None:
        """Submits a client's request, with what the client has received."""
        resumed = tuple(
            Resumed(sequence, tuple(tokens), sequence in client.ended, client.losses[sequence])
            for sequence, tokens in enumerate(client.received)
            if tokens or client.losses[sequence]
        )
        client.attempts += 1
        self.engine.submit(
            make_submission(
                client.prompt, request_id=client.wire_id, max_tokens=client.max_tokens,
                cache_salt=client.salt, n=client.n, resumed_sequences=resumed, age_s=1.0 if client.attempts > 1 else None,
                stop_token_ids=() if client.stop is None else (client.stop,),
            ),
            client.sink,
        )  # fmt: skip


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("lease", [1, 9])
@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("refused", [None, 0])
def test_reporting_requests_and_a_refused_one_end(
    runs_ahead: bool, lease: int, refused: int | None, collects: bool
) -> None:
    """Outputs in place of columns, and a refused admission, keep no other request from its tokens."""
    machine = ProtocolMachine()
    machine.start(
        chunk=2, block=4, num_blocks=30, groups=[FULL], generated=False, lease=lease, jump=0,
        depth=2, runs_ahead=runs_ahead, reporting=1, collects=collects,
    )  # fmt: skip
    for prompt in ([3] * 12, [4] * 11, [4, 3] * 5):
        machine.submit(prompt=prompt, max_tokens=14, n=1, salt="", stop_at=None, refused=None)
    machine.submit(prompt=[3, 4], max_tokens=4, n=1, salt="", stop_at=None, refused=refused)
    machine.teardown()


def test_a_refused_fork_leaves_nothing_in_the_prefix_cache() -> None:
    """The worker computes no token of it, so its copy of the prompt's last block never fills."""
    machine = ProtocolMachine()
    machine.start(
        chunk=2, block=8, num_blocks=28, groups=[FULL], generated=True, lease=1, jump=0,
        depth=1, runs_ahead=False, reporting=0,
    )  # fmt: skip
    machine.submit(prompt=[3, 4, 3, 4, 4, 4], max_tokens=1, n=2, salt="", stop_at=None, refused=4)
    machine.teardown()


TestProtocol = ProtocolMachine.TestCase
TestProtocol.settings = machine(max_examples=80, stateful_step_count=50)
