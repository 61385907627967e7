"""vLLM's API server in front of an engine without a model; runs in vLLM's own environment.

``python vllm_server.py --tokens FILE --engine-cores 1 -- FLAGS`` takes flags of ``vllm serve``. The engine
is a process that speaks the protocol of vLLM's engine core over the same kind of sockets. It gives every
request one token a step, at the pace of their seed. The server is vLLM's own, unchanged.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The folder of this file: the script runs by its path, outside the checkout's environment.
from token_clock import Answer, Pace, read_token_ids  # type: ignore[import-not-found]


def run_engine(input_address: str, output_address: str, tokens: Path, cores: set[int]) -> None:
    """Emits tokens until the process ends."""
    import zmq
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine import EngineCoreRequestType as Kind
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    token_ids = read_token_ids(tokens)
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    incoming.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
    incoming.connect(input_address)
    outgoing.connect(output_address)
    incoming.send(b"")  # ready, without changes to the configuration
    encoder, generic = MsgpackEncoder(), MsgpackDecoder()
    requests = MsgpackDecoder(EngineCoreRequest)
    running: dict[str, Answer] = {}

    pace = Pace(0)

    def take(frames: list[Any]) -> None:
        nonlocal pace
        kind, data = Kind(bytes(frames[0].buffer)), frames[1:]
        if kind is Kind.ADD:
            request = requests.decode(data)
            pace = pace.at(request.sampling_params.seed or 0)
            running[request.request_id] = Answer(token_ids, request.sampling_params.max_tokens, len(running))
        elif kind is Kind.ABORT:
            for name in generic.decode(data):
                running.pop(name, None)
        elif kind is Kind.UTILITY:
            _, call_id, method, _ = generic.decode(data)
            outgoing.send_multipart(encoder.encode(_answer_to(method, call_id)))

    while True:
        while not running:
            take(incoming.recv_multipart(copy=False))
        wait_s = pace.wait_s()
        due = time.monotonic() + wait_s
        while incoming.poll(max(0.0, 1e3 * (due - time.monotonic()))):
            take(incoming.recv_multipart(copy=False))
        outputs = _step(running)
        if outputs:
            outgoing.send_multipart(encoder.encode(EngineCoreOutputs(outputs=outputs)))


def _step(running: dict[str, Answer]) -> list[Any]:
    """Returns one token of each answer; removes those that end."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    outputs = []
    for name, answer in list(running.items()):
        token_id, last = answer.next()
        outputs.append(
            EngineCoreOutput(name, [token_id], finish_reason=FinishReason.LENGTH if last else None)
        )
        if last:
            del running[name]
    return outputs


def _answer_to(method: str, call_id: int) -> Any:
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    result = ("generate",) if method == "get_supported_tasks" else None
    return EngineCoreOutputs(utility_output=UtilityOutput(call_id, result=UtilityResult(result)))


def main() -> None:
    """Starts the engine, then serves in this process."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--engine-cores", required=True)
    own = parser.parse_args(sys.argv[1:split])
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[split + 1 :])
    validate_parsed_serve_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/input", f"ipc://{folder}/output"]
        engine = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(*addresses, own.tokens, set(map(int, own.engine_cores.split(",")))),
            daemon=True,
        )
        engine.start()
        listen_address, listener = setup_server(arguments, reuse_port=False)
        client = {"input_address": addresses[0], "output_address": addresses[1]}
        try:
            uvloop.run(run_server_worker(listen_address, listener, arguments, client))
        finally:
            engine.kill()


if __name__ == "__main__":
    main()
