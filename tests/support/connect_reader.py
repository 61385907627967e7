"""Reads a Connect stream as a client does: turns columns back into events."""

from protos.triptych.v1 import inference_pb2 as inference


class ConnectReader:
    """The handles of one stream."""

    def __init__(self) -> None:
        self._sequences: dict[int, tuple[str, int]] = {}

    def events(self, response: inference.ConnectResponse) -> list[inference.GenerateEvent]:
        """Returns the news of one message as full events, in order."""
        assert len(response.handles) == len(response.token_ids)
        events = []
        for handle, token_id in zip(response.handles, response.token_ids, strict=True):
            request_id, sequence = self._sequences[handle]
            events.append(
                inference.GenerateEvent(request_id=request_id, sequence=sequence, token_ids=[token_id])
            )
        for event in response.events:
            if event.handle:
                assert event.handle not in self._sequences
                self._sequences[event.handle] = (event.request_id, event.sequence)
            events.append(event)
        return events
