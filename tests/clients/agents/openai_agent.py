"""An agent of OpenAI's Agents SDK with two tools and a structured answer; prints what happened as JSON."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

base_url, model_name, api_key, interface = sys.argv[1:]
called: list[str] = []
set_tracing_disabled(True)


class Report(BaseModel):
    """What the agent found."""

    city: str
    is_sunny: bool


@function_tool
def weather(city: str) -> str:
    """Returns the weather of a city."""
    called.append("weather")
    return "sunny, 21 degrees"


@function_tool
def population(city: str) -> str:
    """Returns the number of people who live in a city."""
    called.append("population")
    return "2 million"


async def main() -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    kind = OpenAIResponsesModel if interface == "responses" else OpenAIChatCompletionsModel
    model = kind(model=model_name, openai_client=client)
    # A tool must be called first; afterwards the SDK lets the model answer.
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200)
    agent = Agent(
        name="reporter",
        instructions="Answer with the tools.",
        model=model,
        model_settings=settings,
        tools=[weather, population],
        output_type=Report,
    )
    result = await Runner.run(agent, "What is the weather in Paris?", max_turns=6)
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=6)
    events = [event.type async for event in streamed.stream_events()]
    print(
        json.dumps(
            {
                "called": called,
                "report": result.final_output.model_dump(),
                "streamed_report": streamed.final_output.model_dump(),
                "raw_events": events.count("raw_response_event"),
                "items": [item.type for item in result.new_items],
            }
        )
    )


asyncio.run(main())
