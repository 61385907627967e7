"""Loads a LoRA adapter into a running deployment, asks it and the base model, and unloads it.

python examples/lora.py FOLDER, where FOLDER is an adapter that PEFT saved, on the worker's machine.
"""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    # Loading needs the deployment's admin key.
    api_key=os.environ.get("OPENAI_API_KEY", "unused"),
)
base = client.models.list().data[0].id

client.post("/load_lora_adapter", body={"lora_name": "mine", "lora_path": sys.argv[1]}, cast_to=str)
try:
    for model in (base, "mine"):
        answer = client.completions.create(
            model=model, prompt="The capital of France is", temperature=0, max_tokens=8
        )
        print(f"{model}: {answer.choices[0].text!r}")
finally:
    client.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)
