"""Compares sentences by their embeddings."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "unused"),
)
model = client.models.list().data[0].id
texts = ["A cat sits on the mat.", "On a rug, a kitten is sitting.", "The stock market fell by two percent."]

vectors = [entry.embedding for entry in client.embeddings.create(model=model, input=texts).data]
for text, vector in zip(texts, vectors, strict=True):
    # Embeddings have length 1, so the product is the cosine of the angle.
    similarity = sum(x * y for x, y in zip(vectors[0], vector, strict=True))
    print(f"{similarity:.2f}  {text}")
