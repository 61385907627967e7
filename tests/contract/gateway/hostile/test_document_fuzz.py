"""Requests that schemathesis makes up from the OpenAPI document, with keys on."""

import asyncio
import json
from typing import Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import SecretStr
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from tests.support.gateway.documented import resolved
from tests.support.gateway.serving import TEXT, Stack, minilm_folder, running_stack

pytestmark = pytest.mark.contract

ADMIN: Final = {"authorization": "Bearer sk-admin"}
LONGEST_S: Final = 10
# Schemas beyond this size take schemathesis a second each before the first example.
SMALL_SCHEMA: Final = 8_000

CHECKS: Final = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


def call(stack: Stack, session: requests.Session, operation: Any, examples: int) -> set[int]:
    """Calls one operation a number of times; returns the statuses of the answers."""
    statuses = set[int]()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    def call_once(case: Any) -> None:
        response = case.call(
            base_url=stack.gateway.base_url, session=session, headers=ADMIN, timeout=LONGEST_S
        )
        statuses.add(response.status_code)
        streamed = "text/event-stream" in str(response.headers.get("content-type"))
        # The document describes a stream as text; schemathesis takes the description for that of one event.
        excluded = [checks.response_schema_conformance] if streamed else []
        case.validate_response(response, checks=CHECKS, excluded_checks=excluded)

    call_once()
    return statuses


def call_all(stack: Stack, examples: int, largest: int | None = None) -> dict[str, set[int]]:
    """Calls the operations of the document; returns the statuses of each.

    Args:
        stack: serves.
        examples: requests per operation.
        largest: the size of the largest description of an operation that is called; ``None``: any.
    """
    document = stack.gateway.app.openapi()
    schema = schemathesis.openapi.from_dict(document)
    with requests.Session() as session:
        return {
            operation.label: call(stack, session, operation, examples)
            for operation in (one.ok() for one in schema.get_all_operations() if isinstance(one, Ok))
            if largest is None
            or len(json.dumps(resolved(document["paths"][operation.path][operation.method], document)))
            <= largest
        }


def keys() -> dict[str, Any]:
    return {"api_key": (SecretStr("sk"),), "admin_api_key": SecretStr("sk-admin")}


async def test_small_routes() -> None:
    """No made-up request gets a 5xx or an answer that the document does not describe."""
    async with running_stack(TEXT, **keys()) as stack:
        seen = await asyncio.to_thread(call_all, stack, 2, SMALL_SCHEMA)
        assert len(seen) > 15
        assert seen["GET /live"] == {200}
        assert stack.gateway.client.num_pending == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("generates", [True, False])
async def test_all_routes(generates: bool) -> None:
    """As above, for every route, with a model that generates and one that embeds."""
    folder = None if generates else minilm_folder()
    async with running_stack(TEXT, folder=folder, model_poll_s=0.05, **keys()) as stack:
        if not generates:
            stack.scheduler.pooled_size, stack.scheduler.model = 4, "embedder"
            while stack.gateway.app.state.context.watcher.model_name != "embedder":
                await asyncio.sleep(0.05)
        seen = await asyncio.to_thread(call_all, stack, 100)
        assert 200 in seen["POST /v1/chat/completions" if generates else "POST /rerank"]
        assert 401 not in set().union(*seen.values())
        assert stack.gateway.client.num_pending == 0
