"""Answers held to a form: a JSON schema, and one of a few texts.

The form always holds. What fills it is the model's: the demo model has never seen JSON, and fills it badly.
"""

import json

from server import client, model

SCHEMA = {
    "type": "object",
    "properties": {"result": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["result"],
    "additionalProperties": False,
}

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 7 plus 5?"}],
    response_format={"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}},
    temperature=0,
)
print(json.loads(answer.choices[0].message.content))

# Fields that are not OpenAI's go through `extra_body`; this one is vLLM's.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What color is the sky?"}],
    extra_body={"structured_outputs": {"choice": ["The sky is blue.", "The sky is green."]}},
    temperature=0,
)
print(answer.choices[0].message.content)
