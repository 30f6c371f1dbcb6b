"""Sends what agents and SDKs were seen to send: `python tools/clients/agents_client.py [URL] [KEY]`.

Nothing but Python is needed. The fields are those of Claude Code, Codex CLI, the AI SDK, LiteLLM, LangChain,
OpenRouter's and vLLM's clients; the answers are the demo model's, which `ferrum serve` serves. Each request has to
be answered, with its unknown hints named in `x-ferrum-ignored`, and with nothing that those clients reject.
"""

import json
import sys
import urllib.error
import urllib.request

URL = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000").removesuffix("/v1")
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
SUM = "What is 7 plus 5?"


def send(path, body, headers=None):
    """Status, headers and the answer: JSON, or the data of its events."""
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **(headers or {})}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), head)
    try:
        reply = urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        text = reply.read().decode()
        if not reply.headers.get("Content-Type", "").startswith("text/event-stream"):
            return reply.status, reply.headers, json.loads(text)
        data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return reply.status, reply.headers, [json.loads(one) for one in data if one != "[DONE]"]


def ask(path, body, ignored=(), headers=None):
    status, head, answer = send(path, body, headers)
    assert status == 200, (path, status, answer)
    named = [name for name in (head.get("x-ferrum-ignored") or "").split(", ") if name]
    assert sorted(named) == sorted(ignored), (path, named, ignored)
    return answer


def claude_code():
    """A turn with everything that it sends beside the text, and the same with the result of a tool."""
    tools = [{
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **WEATHER},
        "eager_input_streaming": True,
        "cache_control": {"type": "ephemeral", "scope": "global"},
        "defer_loading": False,
        "input_examples": [{"city": "Paris"}],
    }]
    body = {
        "model": "ferrum-demo",
        "max_tokens": 64,
        "temperature": 0,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}]}],
        "tools": tools,
        "metadata": {"user_id": "u", "session": {"a": 1}},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    version = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    hints = ["thinking.type", "context_management", "output_config.effort"]
    events = ask("/v1/messages?beta=true", body, hints, version)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    begun = [event for event in events if event["type"] == "content_block_start"]
    # The AI SDK rejects a null here.
    assert all("citations" not in event["content_block"] for event in begun)
    body["stream"] = False
    body["messages"] += [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "A file.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"city": "Paris"}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [
                {"type": "text", "text": "7 plus 5 is 12."},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "twelve"}},
                # Of a file that the agent read: the model is told that it cannot.
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}]},
            {"type": "text", "text": SUM}]},
    ]
    unread = ["messages[1].content[1]", "messages[2].content[0].content[2]"]
    whole = ask("/v1/messages", body, [*hints, *unread], version)
    assert whole["stop_reason"] in ("end_turn", "tool_use"), whole
    count = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
    assert ask("/v1/messages/count_tokens", count, ["thinking.type", *unread], version)["input_tokens"] > 10


def structured_messages():
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    body = {"model": "ferrum-demo", "max_tokens": 64, "temperature": 0, "messages": [{"role": "user", "content": SUM}],
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    answer = json.loads(ask("/v1/messages", body)["content"][0]["text"])
    # No key is invented.
    assert list(answer) == ["sum"], answer


def codex():
    """A turn on `/v1/responses`, streamed, and the next with what came back."""
    body = {
        "model": "ferrum-demo",
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": SUM}]}],
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "parameters": WEATHER},
            {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read", "parameters": WEATHER}]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "service_tier": "priority",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "max_output_tokens": 64,
        "temperature": 0,
    }
    hints = ["tools[2]", "tools[3]", "tools[4]", "reasoning.effort", "text.verbosity", "truncation"]
    events = ask("/v1/responses", body, hints)
    response = events[-1]["response"]
    assert response["status"] == "completed", response
    body["stream"] = False
    body["input"] += [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "A sum."}], "encrypted_content": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "shell", "namespace": "x", "arguments": "{\"city\":\"a\"}"},
        {"type": "function_call_output", "call_id": "1", "output": [
            {"type": "input_text", "text": "12"}, {"type": "input_image", "image_url": "data:,", "detail": "high"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        *response["output"],
        {"type": "message", "role": "user", "content": SUM},
    ]
    assert ask("/v1/responses", body, [*hints, "input[3].output[1]", "input[4]"])["output"]


def kept_responses():
    """Going on by id, by reference to an item, and the list of what was asked."""
    first = ask("/v1/responses", {"model": "ferrum-demo", "input": SUM, "max_output_tokens": 32, "temperature": 0})
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    items = [{"role": "user", "content": SUM}, reference, {"role": "user", "content": SUM}]
    assert ask("/v1/responses", {"input": items, "max_output_tokens": 32})["output"]
    head = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{URL}/v1/responses/{first['id']}/input_items", headers=head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["data"][0]["content"][0]["text"] == SUM


def chats():
    """Hints of several SDKs, and what they send back with an answer."""
    body = {
        "model": "ferrum-demo",
        "messages": [
            {"role": "user", "content": SUM},
            {"role": "assistant", "content": "12.", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "provider_specific_fields": {"a": 1}, "reasoning_details": []},
            {"role": "user", "content": [{"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}]},
        ],
        "reasoning_effort": "high",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 32,
        "temperature": 0,
        "prediction": {"type": "content", "content": "12"},
        "verbosity": "low",
        "store": True,
        "guided_decoding_backend": "xgrammar",
        "n_predict_hint": 5,
    }
    chunks = ask("/v1/chat/completions", body, ["reasoning_effort", "prediction", "verbosity", "store", "n_predict_hint"])
    usage = [chunk["usage"] for chunk in chunks]
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in usage)
    assert usage[-1]["completion_tokens"] >= usage[0]["completion_tokens"]
    grammar = "root ::= \"12\""
    body = {"messages": [{"role": "user", "content": SUM}], "max_tokens": -1, "guided_grammar": grammar,
            "structured_outputs": {"grammar": grammar}}
    assert ask("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "12"


def older_clients():
    """What clients of years ago send, and front ends whose fields are empty."""
    body = {"model": "ferrum-demo", "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "functions": [{"name": "get_weather", "parameters": WEATHER}], "function_call": "auto", "temperature": 0,
            "stop": [""], "grammar": "", "penalty_last_n": 64}
    choice = ask("/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "function_call", choice
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"}), call
    body["messages"] += [choice["message"], {"role": "function", "name": "get_weather", "content": "sunny"}]
    assert ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    # A tool may have looked at an image.
    call = {"id": "1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": SUM}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, image]}]}
    ask("/v1/chat/completions", body, ["messages[2].content[1]"])
    # A conversation has a vector.
    for path in ("/v1/embeddings", "/pooling"):
        assert len(ask(path, {"messages": [{"role": "user", "content": SUM}]})["data"]) == 1


def refusals():
    """What would change the answer is refused by name; what does not fit, in words that clients look for."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    status, _, answer = send("/v1/chat/completions", {"messages": [image]})
    assert status == 400 and answer["error"]["param"] == "messages[0].content[0].type", answer
    long = [{"role": "user", "content": "cat " * 5000}]
    status, _, answer = send("/v1/chat/completions", {"messages": long})
    assert status == 400 and answer["error"]["message"].startswith("This model's maximum context length is "), answer
    status, _, answer = send("/v1/messages", {"messages": long, "max_tokens": 5})
    assert status == 400 and answer["error"]["message"].startswith("prompt is too long: "), answer


for check in (claude_code, structured_messages, codex, kept_responses, chats, older_clients, refusals):
    check()
    print(f"{check.__name__}: ok")
