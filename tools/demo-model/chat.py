"""The chat format: ChatML with Hermes-style tool calls.

`TEMPLATE` goes into the GGUF as `tokenizer.chat_template`. `render` does the same in Python,
in pieces, because training needs to know which pieces the model itself has to say.
"""

import json

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [PAD, START, END]

TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- " + json.dumps(TOOLS_BEFORE) + " }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- " + json.dumps(TOOLS_AFTER) + " }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}"
    "{%- if not loop.first %}{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    "{{- '\\n<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}"
    "{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def dumps(value, compact=False, sort=False) -> str:
    """JSON as template engines write it: Jinja puts spaces, others do not, some sort the keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=sort, separators=(",", ":") if compact else (", ", ": "))


def call_text(name: str, arguments: dict, compact=False) -> str:
    return '<tool_call>\n{"name": "' + name + '", "arguments": ' + dumps(arguments, compact) + "}\n</tool_call>"


def render(messages, tools=None, generation_prompt=False, compact=False, sort=False):
    """The conversation as [(text, said by the model)]; joined, it is what `TEMPLATE` gives."""
    out = []
    rest = list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else None
    if tools:
        lines = "".join("\n" + dumps(t, compact, sort) for t in tools)
        prefix = system + "\n\n" if system else ""
        system = prefix + TOOLS_BEFORE + lines + TOOLS_AFTER
    if system:
        out.append((f"{START}system\n{system}{END}\n", False))
    for m in rest:
        if m["role"] == "assistant":
            content = m.get("content") or ""
            calls = [call_text(c["function"]["name"], c["function"]["arguments"], compact) for c in m.get("tool_calls", [])]
            out.append((f"{START}assistant\n", False))
            # A compact call stands for an engine's rendering of the past, not for what to say.
            out.append(("\n".join(([content] if content else []) + calls) + END, not (calls and compact)))
            out.append(("\n", False))
        elif m["role"] == "tool":
            out.append((f"{START}user\n<tool_response>\n{m['content']}\n</tool_response>{END}\n", False))
        else:
            out.append((f"{START}{m['role']}\n{m['content']}{END}\n", False))
    if generation_prompt:
        out.append((f"{START}assistant\n", False))
    return out
