"""Requests to a stack in containers."""

import json
import urllib.request


def completion(port: int, headers: dict[str, str], **fields: object) -> urllib.request.Request:
    """Returns a request for a greedy answer."""
    body = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, **fields}
    return urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )


def ask(port: int, max_tokens: int = 8) -> str:
    """Asks a question with one right answer."""
    with urllib.request.urlopen(completion(port, {}, max_tokens=max_tokens), timeout=180) as answer:
        return str(json.load(answer)["choices"][0]["text"])
