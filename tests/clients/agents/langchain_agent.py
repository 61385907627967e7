"""An agent of LangChain with two tools and a structured answer; prints what happened as JSON."""

import json
import sys
from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

base_url, model, api_key, interface = sys.argv[1:]
called: list[str] = []


def weather(city: str) -> str:
    """Returns the weather of a city."""
    called.append("weather")
    return "sunny, 21 degrees"


def population(city: str) -> str:
    """Returns the number of people who live in a city."""
    called.append("population")
    return "2 million"


class Report(BaseModel):
    """What the agent found."""

    city: str
    is_sunny: bool


@wrap_model_call
def call_a_tool_first(
    request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
) -> ModelResponse:
    """Requires a call in the first turn: a small model would answer from memory."""
    choice = "required" if request.messages[-1].type == "human" else "none"
    return handler(request.override(model_settings={"tool_choice": choice}))


llm = ChatOpenAI(
    base_url=base_url,
    model=model,
    api_key=api_key,
    temperature=0,
    max_tokens=200,
    use_responses_api=interface == "responses",
    model_kwargs={"parallel_tool_calls": False},
)
agent = create_agent(
    llm, [weather, population], middleware=[call_a_tool_first], response_format=ProviderStrategy(Report)
)
question = {"messages": [("user", "What is the weather in Paris?")]}
answer = agent.invoke(question, {"recursion_limit": 12})
chunks = list(ChatOpenAI(base_url=base_url, model=model, api_key=api_key, max_tokens=20).stream("Hi"))
print(
    json.dumps(
        {
            "called": called,
            "turns": [message.type for message in answer["messages"]],
            "report": answer["structured_response"].model_dump(),
            "chunks": len(chunks),
            "tokens": answer["messages"][-1].usage_metadata["total_tokens"],
        }
    )
)
