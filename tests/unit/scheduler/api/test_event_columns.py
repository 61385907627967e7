"""Events of a Connect stream in columns: nothing is lost, repeated or out of order."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from protos.errors import Internal
from protos.service.grpc_options import FULL_MESSAGE_BYTES
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.api.events import ConnectEncoder
from scheduler_svc.api.messages import event_to_protos
from scheduler_svc.requests.request import Event, TokenColumns
from scheduler_svc.requests.sampling import FinishReason
from tests.support.connect_reader import ConnectReader
from tests.support.sampling_params import token_logprobs

News = list[Event | TokenColumns]


def received(encoder: ConnectEncoder, reader: ConnectReader, news: News) -> list[inference_pb2.GenerateEvent]:
    """Returns the events that a client reads from the bytes of the messages."""
    sent = [message.SerializeToString() for message in encoder.encode(news)]
    return [event for data in sent for event in reader.events(inference_pb2.ConnectResponse.FromString(data))]


def by_sequence(
    events: list[inference_pb2.GenerateEvent],
) -> dict[tuple[str, int], list[inference_pb2.GenerateEvent]]:
    """Returns each sequence's events without handles; plain tokens have an event each."""
    found: dict[tuple[str, int], list[inference_pb2.GenerateEvent]] = {}
    for event in events:
        event.ClearField("handle")
        own = found.setdefault((event.request_id, event.sequence), [])
        bare = inference_pb2.GenerateEvent(request_id=event.request_id, sequence=event.sequence)
        bare.token_ids.extend(event.token_ids)
        if event == bare and len(bare.token_ids) > 1:
            for token_id in event.token_ids:
                own.append(replace_tokens(bare, token_id))
        else:
            own.append(event)
    return found


def replace_tokens(event: inference_pb2.GenerateEvent, token_id: int) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        request_id=event.request_id, sequence=event.sequence, token_ids=[token_id]
    )


names = st.sampled_from(["a", "b", "c"])
plain = st.builds(
    Event, names, st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), sequence=st.integers(0, 1)
)
full = st.one_of(
    plain.map(lambda event: replace(event, first=True, num_prompt_tokens=3)),
    plain.map(lambda event: replace(event, finish_reason=FinishReason.LENGTH)),
    plain.map(lambda event: replace(event, token_ids=(5,), logprobs=(token_logprobs(-0.5, 2),))),
    st.builds(Event, names, error=st.just(Internal("lost"))),
    st.builds(Event, names, worker_losses=st.integers(0, 2), sequence=st.integers(0, 1)),
)
columns = st.lists(names, min_size=1, max_size=3, unique=True).flatmap(
    lambda ids: st.tuples(st.just(ids), st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids)))
)


@given(steps=st.lists(st.lists(st.one_of(plain, full, columns), max_size=4), max_size=12))
def test_columns_say_the_same_as_full_events(steps: list[News]) -> None:
    """Whatever the order of beginnings, tokens, ends and failures, each sequence reads the same news."""
    encoder, reader = ConnectEncoder(), ConnectReader()
    got = [event for news in steps for event in received(encoder, reader, news)]
    wanted = [message for news in steps for event in news for message in event_to_protos(event)]
    assert by_sequence(got) == by_sequence(wanted)


def test_a_decode_step_is_two_columns() -> None:
    """From its second token on, a request is in no event: 128 rows are at most 1 KiB."""
    encoder = ConnectEncoder()
    ids = [f"request-{number}" for number in range(128)]
    list(encoder.encode([Event(name, (7,), first=True) for name in ids]))
    (message,) = encoder.encode([(ids, [100_000] * 128)])
    assert (len(message.events), len(message.handles), len(message.token_ids)) == (0, 128, 128)
    assert message.ByteSize() < 1024


def test_an_ended_sequence_frees_its_handle() -> None:
    """A later request with the same id has another handle, told in its first event."""
    encoder = ConnectEncoder()
    (first,) = encoder.encode([Event("r", (1,), first=True)])
    list(encoder.encode([Event("r", (2,), finish_reason=FinishReason.STOP)]))
    (again,) = encoder.encode([Event("r", (3,))])
    assert first.events[0].handle != again.events[0].handle != 0


def test_a_step_of_many_events_is_several_messages() -> None:
    """No message is above the limit, even if an event is. No event is lost, repeated or out of order."""
    entry = token_logprobs(-0.5, 70_000, *((150_000 + token, -0.25) for token in range(20)))
    prompt = [
        token_logprobs(-0.5, rank, *((150_000 + token, -0.25) for token in range(20)))
        for rank in range(1, 9000)
    ]
    names = [f"{'t' * 120}{number}" for number in range(9000)]
    events: list[Event | TokenColumns] = [
        (names[:4000], range(4000)),
        Event("r", prompt_logprobs=prompt, first=True, num_prompt_tokens=9000),
        Event("r", (5,), (entry,), FinishReason.STOP, 5),
        (names[4000:], range(4000, 9000)),
    ]
    messages = list(ConnectEncoder().encode(events))
    assert max(message.ByteSize() for message in messages) < FULL_MESSAGE_BYTES + (64 << 10)
    reader = ConnectReader()
    received = [event for message in messages for event in reader.events(message)]
    assert [entry.rank for event in received for entry in event.prompt_logprobs] == list(range(1, 9000))
    assert [event.prompt.num_tokens for event in received if event.HasField("prompt")] == [9000]
    plain = [event.token_ids[0] for event in received if event.request_id != "r"]
    assert plain == list(range(9000))
    of_r = [index for index, event in enumerate(received) if event.request_id == "r"]
    assert of_r == list(range(4000, 4000 + len(of_r)))
    assert received[of_r[-1]].finish_reason == common_pb2.FINISH_REASON_STOP
    assert [event.request_id for event in received if event.request_id != "r"] == names
    assert len(list(ConnectEncoder().encode([(names[:3], range(3)), Event("r", (5,))]))) == 1
