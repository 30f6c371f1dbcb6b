"""Tries a running server with OpenAI's own client: `python tools/clients/openai_client.py [URL] [KEY]`.

Needs the package `openai`; without it the script says so and ends well. The expected answers are those of
the demo model, which `ferrum serve` serves.
"""

import json
import sys
from typing import Annotated, Literal, Union

try:
    import openai
except ImportError:
    print("skipped: the package `openai` is not installed")
    sys.exit(0)
try:
    import pydantic
except ImportError:
    pydantic = None

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)

SUM = [{"role": "user", "content": "What is 7 plus 5?"}]
WEATHER = {"role": "user", "content": "What is the weather in Paris?"}
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}]


def models():
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    return model.id


def chat(model):
    answer = client.chat.completions.create(model=model, messages=SUM, temperature=0, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content == "7 plus 5 is 12.", choice
    assert choice.finish_reason == "stop"
    # The token that ends the answer counts, and is not listed.
    assert len(choice.logprobs.content) + 1 == answer.usage.completion_tokens


def chat_stream(model):
    stream = client.chat.completions.create(
        model=model, messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}, n=2
    )
    texts, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {0: "7 plus 5 is 12.", 1: "7 plus 5 is 12."}, texts
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def tools(model):
    answer = client.chat.completions.create(model=model, temperature=0, messages=[WEATHER], tools=TOOLS)
    said = answer.choices[0].message
    (call,) = said.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    answer = client.chat.completions.create(model=model, temperature=0, messages=[WEATHER, said, result], tools=TOOLS)
    assert answer.choices[0].message.content

    parts = []
    for chunk in client.chat.completions.create(
        model=model, temperature=0, messages=[WEATHER], tools=TOOLS, tool_choice="required", stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            parts.append(call.function.arguments)
    assert json.loads("".join(parts)) == {"city": "Paris"}, parts


def structured(model):
    if pydantic is None:
        print("skipped: the package `pydantic` is not installed")
        return

    class Item(pydantic.BaseModel):
        kind: Literal["nail", "rail"]
        count: Annotated[int, pydantic.Field(ge=1, le=20)]

    class Order(pydantic.BaseModel):
        items: Annotated[list[Item], pydantic.Field(min_length=1, max_length=3)]
        urgent: bool
        other: Union[Item, None]

    answer = client.chat.completions.parse(model=model, temperature=0, messages=SUM, response_format=Order)
    order = answer.choices[0].message.parsed
    assert isinstance(order, Order) and 1 <= len(order.items) <= 3, answer
    with client.chat.completions.stream(model=model, temperature=0, messages=SUM, response_format=Order) as stream:
        for event in stream:
            if event.type == "content.done":
                assert isinstance(event.parsed, Order), event
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Order)

    class Weather(pydantic.BaseModel):
        """What the weather is."""

        city: Literal["Oslo", "Rome"]
        days: Annotated[int, pydantic.Field(ge=1, le=9)]

    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    assert tool["function"]["strict"]
    for choice in ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]:
        answer = client.chat.completions.parse(
            model=model, temperature=0, messages=[WEATHER], tools=[tool], tool_choice=choice
        )
        for call in answer.choices[0].message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Weather), answer
        with client.chat.completions.stream(
            model=model, temperature=0, messages=[WEATHER], tools=[tool], tool_choice=choice
        ) as stream:
            final = stream.get_final_completion()
        for call in final.choices[0].message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Weather), final

    for extra, fits in [
        ({"guided_choice": ["no", "never"]}, lambda text: text in ("no", "never")),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: len(text) == 3 and text.isdigit()),
        ({"grammar": 'root ::= "a"{2,3}'}, lambda text: text in ("aa", "aaa")),
    ]:
        answer = client.chat.completions.create(model=model, temperature=0, messages=SUM, extra_body=extra)
        assert fits(answer.choices[0].message.content), answer


def completions(model):
    prompt = "Once upon a time"
    answer = client.completions.create(model=model, temperature=0, prompt=prompt, max_tokens=8, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith(prompt) and choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs[0] is None
    stream = client.completions.create(model=model, temperature=0, prompt=[prompt, prompt], max_tokens=8, stream=True)
    texts = {}
    for chunk in stream:
        for part in chunk.choices:
            texts[part.index] = texts.get(part.index, "") + part.text
    assert texts[0] == texts[1] == choice.text.removeprefix(prompt), texts


def responses(model):
    first = client.responses.create(model=model, temperature=0, input="My name is Clara.")
    assert first.status == "completed" and first.usage.total_tokens > 0
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=model, temperature=0, input="What is my name?", previous_response_id=first.id
    )
    assert second.output_text == "Your name is Clara.", second
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
        raise AssertionError("it was deleted")
    except openai.NotFoundError:
        pass

    kinds, text = [], ""
    stream = client.responses.create(
        model=model, input=SUM, temperature=0, instructions="You are a helpful assistant.", stream=True
    )
    for event in stream:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    assert event.response.output_text == text == "7 plus 5 is 12.", text
    # The client's own way to follow a stream.
    with client.responses.stream(model=model, input=SUM, temperature=0) as stream:
        for event in stream:
            pass
        assert stream.get_final_response().output_text == "7 plus 5 is 12."


def response_tools(model):
    tools = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    for choice in ["auto", "required", {"type": "function", "name": "get_weather"}]:
        answer = client.responses.create(model=model, temperature=0, input=[WEATHER], tools=tools, tool_choice=choice)
        (call,) = answer.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}, call
        result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
        answer = client.responses.create(model=model, temperature=0, input=[WEATHER, call, result], tools=tools)
        assert answer.output_text


def embeddings(model):
    texts = ["Once upon a time", "there was a little fox"]
    # The client asks for base64 unless told otherwise.
    as_bytes = client.embeddings.create(model=model, input=texts)
    as_numbers = client.embeddings.create(model=model, input=texts, encoding_format="float")
    for one, other in zip(as_bytes.data, as_numbers.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6
        assert abs(sum(x * x for x in one.embedding) - 1) < 1e-5
    short = client.embeddings.create(model=model, input=texts[0], dimensions=16)
    assert len(short.data[0].embedding) == 16
    assert as_bytes.usage.prompt_tokens > 0


def errors(model):
    def refused(kind, **fields):
        try:
            client.chat.completions.create(**{"model": model, "messages": SUM, **fields})
        except kind as error:
            return error
        raise AssertionError(f"{fields} was not refused")

    assert refused(openai.BadRequestError, temperature=7).param == "temperature"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert refused(openai.BadRequestError, messages=image).param == "messages[0].content[0].type"
    # A hint that cannot be followed is told, and refuses nothing.
    told = client.chat.completions.with_raw_response.create(
        model=model, messages=SUM, max_tokens=2, reasoning_effort="low"
    )
    assert told.headers["x-ferrum-ignored"] == "reasoning_effort"
    assert refused(openai.NotFoundError, model="another").code == "model_not_found"


def main():
    model = models()
    for check in [
        chat, chat_stream, tools, structured, completions, responses, response_tools, embeddings, errors
    ]:
        check(model)
        print(f"ok: {check.__name__}")


main()
