"""Requests under way: what a refusal does to a parked one."""

from gateway.scheduler_link.parking import Parking
from gateway.scheduler_link.request_table import Outbox, RequestTable
from protos.errors import Unavailable
from protos.triptych.v1 import inference_pb2 as inference


async def test_a_refusal_before_the_write_returns_is_not_taken_for_silence() -> None:
    """The refused request keeps its place, and its time to be sent again is not overwritten."""
    parking = Parking(4, 30.0)
    table = RequestTable(Outbox(), parking, 60.0)
    group = table.submit([inference.GenerateRequest(prompt_token_ids=[5])])
    (pending,) = group.requests
    refused = inference.GenerateEvent(
        request_id=pending.wire_id, error=Unavailable("draining", retry_after_ms=2000).to_proto()
    )
    table.deliver(inference.ConnectResponse(events=[refused]))
    again = pending.retry
    assert again is not None
    table.on_written(pending.wire_id)
    assert pending.retry is again
    assert pending in parking
    group.fail(Unavailable("the test ends"))
    table.abort(pending)
    assert pending not in parking
