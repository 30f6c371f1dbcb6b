"""Tries a running server with Anthropic's own client: `python tools/clients/anthropic_client.py [URL] [KEY]`.

Needs the package `anthropic`; without it the script says so and ends well. The expected answers are those
of the demo model, which `ferrum serve` serves. The URL has no `/v1` at its end.
"""

import sys

try:
    import anthropic
except ImportError:
    print("skipped: the package `anthropic` is not installed")
    sys.exit(0)

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
MODEL = "ferrum-demo"
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)

SUM = [{"role": "user", "content": "What is 7 plus 5?"}]
WEATHER = {"role": "user", "content": "What is the weather in Paris?"}
TOOLS = [{
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}]


# Newer versions of the client have no argument for it.
GREEDY = {"temperature": 0}


def create(**fields):
    return client.messages.create(
        **{"model": MODEL, "max_tokens": 64, "messages": SUM, "extra_body": GREEDY, **fields}
    )


def messages():
    answer = create(system="You are a helpful assistant.")
    assert answer.content[0].text == "7 plus 5 is 12.", answer
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
    answer = create(stop_sequences=[" 12"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " 12"), answer
    assert create(max_tokens=2).stop_reason == "max_tokens"
    conversation = [
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": [{"type": "text", "text": "Nice to meet you, Clara!"}]},
        {"role": "user", "content": "What is my name?"},
    ]
    assert create(messages=conversation).content[0].text == "Your name is Clara."


def stream():
    kinds = [event.type for event in create(stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    with client.messages.stream(model=MODEL, max_tokens=64, messages=SUM, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "7 plus 5 is 12.", final
    assert final.stop_reason == "end_turn"
    usage = create().usage
    tokens = lambda u: u.input_tokens + u.cache_read_input_tokens
    assert tokens(final.usage) == tokens(usage) and final.usage.output_tokens == usage.output_tokens


def tools():
    choices = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}]
    for choice in choices:
        answer = create(messages=[WEATHER], tools=TOOLS, tool_choice=choice)
        (call,) = answer.content
        assert answer.stop_reason == "tool_use" and call.input == {"city": "Paris"}, answer
        with client.messages.stream(
            model=MODEL, max_tokens=64, extra_body=GREEDY, messages=[WEATHER], tools=TOOLS, tool_choice=choice
        ) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.name, streamed.input) == (call.name, call.input), streamed
        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny"}'}
        conversation = [
            WEATHER,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        assert create(messages=conversation, tools=TOOLS).content[0].text


def count():
    counted = client.messages.count_tokens(model=MODEL, messages=SUM, system="Be kind.", tools=TOOLS)
    usage = create(system="Be kind.", tools=TOOLS).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def errors():
    def refused(kind, **fields):
        try:
            create(**fields)
        except kind as error:
            return error
        raise AssertionError(f"{fields} was not refused")

    error = refused(anthropic.BadRequestError, extra_body={"temperature": 7})
    assert error.body["error"]["type"] == "invalid_request_error", error.body
    assert error.body["error"]["message"].startswith("temperature: "), error.body
    assert refused(anthropic.NotFoundError, model="another").body["error"]["type"] == "not_found_error"


def main():
    for check in [messages, stream, tools, count, errors]:
        check()
        print(f"ok: {check.__name__}")


main()
