"""Sends token ids to the scheduler over gRPC and prints those of the answer as they come."""

import os
from pathlib import Path

import grpc

from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

address = os.environ.get("TRIPTYCH_SCHEDULER_ADDRESS", "unix:run/scheduler.sock")
token = Path(os.environ.get("TRIPTYCH_SERVICE_TOKEN_FILE", "run/secure/service-token"))
# A scheduler that was started without a token file asks for none.
metadata = (("authorization", f"Bearer {token.read_text().strip()}"),) if token.exists() else ()
prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is", in SmolLM2's tokens
sampling = common_pb2.SamplingParams(temperature=0, max_tokens=5)

with grpc.insecure_channel(address) as channel:
    inference = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
    for event in inference.Generate(request, metadata=metadata):
        print(list(event.token_ids), flush=True)
