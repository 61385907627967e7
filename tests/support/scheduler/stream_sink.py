"""One client stream that several requests share."""

from collections.abc import Mapping, Sequence

from scheduler_svc.requests.request import Event, Sink


class StreamSink:
    """One client stream: passes its requests' events on to a list for each request."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = sinks

    def push(self, event: Event) -> None:
        self._sinks[event.request_id].push(event)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        assert request_ids
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self._sinks[request_id].push(Event(request_id, (token_id,)))
