"""Streams a chat, then asks for an answer that fits a pydantic model."""

import os

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "unused"),
)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name the capital of France."}],
    temperature=0,
    max_tokens=40,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()


class City(BaseModel):
    """The form of the second answer. The model can write nothing else."""

    name: str
    inhabitants: int


answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Describe Paris."}],
    response_format=City,
    temperature=0,
    max_tokens=60,
)
print(answer.choices[0].message.parsed)
