"""A scheduler without a model: each request of a stream gets one token a step, at the pace of its seed.

``python -m tests.bench.support.gateway.emitting_scheduler`` prints its port.
"""

import argparse
import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from protos.service.grpc_options import ACCEPTED_HEADER
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from tests.bench.support.gateway.token_clock import Answer, Pace, read_token_ids
from tests.support.gateway.fake_scheduler import FakeScheduler, serving


@dataclass
class EmittingScheduler(FakeScheduler):
    """Answers with one token a step; a step's tokens are in columns, as the scheduler's are."""

    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def Connect(self, request_iterator, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        running: dict[str, Answer] = {}
        handles: dict[str, int] = {}
        accepted: list[inference.GenerateEvent] = []
        num_handles, pace = 0, Pace(0)

        async def read() -> None:
            nonlocal pace
            await context.send_initial_metadata((ACCEPTED_HEADER,))
            async for message in request_iterator:
                if message.HasField("generate"):
                    request = message.generate
                    accepted.append(inference.GenerateEvent(request_id=request.request_id, accepted=True))
                    pace = pace.at(request.sampling.seed)
                    running[request.request_id] = Answer(
                        self.reply, request.sampling.max_tokens, len(running)
                    )
                    self.started.set()
                elif message.HasField("abort"):
                    running.pop(message.abort.request_id, None)
                    handles.pop(message.abort.request_id, None)

        reader = asyncio.create_task(read())
        try:
            while not reader.done():
                if not running:
                    self.started.clear()
                    await self.started.wait()
                await asyncio.sleep(pace.wait_s())
                response = inference.ConnectResponse(events=accepted)
                accepted.clear()
                columns, tokens = [], []
                for name, answer in list(running.items()):
                    token_id, last = answer.next()
                    if name in handles and not last:
                        columns.append(handles[name])
                        tokens.append(token_id)
                        continue
                    event = response.events.add(request_id=name, token_ids=[token_id])
                    if last:
                        event.finish_reason = pb.FINISH_REASON_LENGTH
                        del running[name]
                        handles.pop(name, None)
                    else:
                        num_handles += 1
                        event.handle = handles[name] = num_handles
                response.handles.extend(columns)
                response.token_ids.extend(tokens)
                yield response
        finally:
            reader.cancel()


async def _main(arguments: argparse.Namespace) -> None:
    reply = read_token_ids(arguments.tokens)
    fake = EmittingScheduler(arguments.tokenizer, reply, max_model_len=100_000)
    async with serving(fake, arguments.port) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    asyncio.run(_main(parser.parse_args()))
