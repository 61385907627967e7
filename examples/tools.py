"""Lets the model call a function, and gives it the result."""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "unused"),
)
model = client.models.list().data[0].id


def temperature(city: str) -> dict[str, str | int]:
    """The function that the model may call."""
    return {"city": city, "celsius": 21}


tool: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How warm is it in Paris?"}]

# "required" forces a call; "auto" leaves the choice to the model.
asked = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="required", temperature=0, max_tokens=80
)
answer = asked.choices[0].message
messages.append(answer.to_dict())  # type: ignore[arg-type]  # the client's answers and requests have types of their own
for call in answer.tool_calls or []:
    if call.type == "function":
        print("call:", call.function.name, call.function.arguments)
        result = temperature(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

final = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)
print("answer:", final.choices[0].message.content)
