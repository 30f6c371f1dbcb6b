"""The model asks for a function of this program, gets its result, and answers with it."""

import json

from server import client, model


def get_weather(city):
    return {"city": city, "weather": "sunny"}


TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        # Arguments are held to the schema while they are generated.
        "strict": True,
    },
}]

messages = [{"role": "user", "content": "What is the weather in Paris?"}]
# A bound, so that a model that calls again and again comes to an end.
for _ in range(4):
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
    message = answer.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message)
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        print(f"{call.function.name}({arguments})")
        result = json.dumps(get_weather(**arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
