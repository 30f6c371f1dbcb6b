"""Where the examples find the server, and which model they ask."""

import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    # The client wants a key, also where the server asks for none.
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
