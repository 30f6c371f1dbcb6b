"""The chat format: ChatML with Hermes-style tool calls.

`TEMPLATE` goes into the GGUF as `tokenizer.chat_template`. `render` does the same in Python,
in pieces, because training needs to know which pieces the model itself has to say.
"""

import json

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [PAD, START, END]

TOOLS_BEFORE = "You can call these tools:\n<tools>"
TOOLS_AFTER = "\n</tools>"

# A tool is listed as `get_weather {"city"}`: a model of this size learns nothing from the rest of its
# schema, and would spend most of its training on reading JSON.
TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- " + json.dumps(TOOLS_BEFORE) + " }}"
    "{%- for tool in tools %}"
    "{%- if tool.function %}{%- set tool = tool.function %}{%- endif %}"
    "{{- '\\n' + tool.name + ' {' }}"
    "{%- if tool.parameters and tool.parameters.properties %}"
    "{%- for name in tool.parameters.properties %}{%- if not loop.first %}{{- ', ' }}{%- endif %}{{- '\"' + name + '\"' }}{%- endfor %}"
    "{%- endif %}"
    "{{- '}' }}"
    "{%- endfor %}"
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


def dumps(value, compact=False) -> str:
    """JSON as programs write it: some with spaces, some without."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else (", ", ": "))


def call_text(name: str, arguments: dict) -> str:
    return '<tool_call>\n{"name": "' + name + '", "arguments": ' + dumps(arguments) + "}\n</tool_call>"


def render(messages, tools=None, generation_prompt=False):
    """The conversation as [(text, said by the model)]; joined, it is what `TEMPLATE` gives. A `given` message is none to learn."""
    out = []
    rest = list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else None
    if tools:
        lines = "".join(f"\n{f['name']} {{{', '.join(map(dumps, f['parameters']['properties']))}}}" for f in (t["function"] for t in tools))
        system = (system + "\n\n" if system else "") + TOOLS_BEFORE + lines + TOOLS_AFTER
    if system:
        out.append((f"{START}system\n{system}{END}\n", False))
    for m in rest:
        if m["role"] == "assistant":
            content = m.get("content") or ""
            calls = [call_text(c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls", [])]
            out.append((f"{START}assistant\n", False))
            out.append(("\n".join(([content] if content else []) + calls) + END, not m.get("given")))
            out.append(("\n", False))
        elif m["role"] == "tool":
            out.append((f"{START}user\n<tool_response>\n{m['content']}\n</tool_response>{END}\n", False))
        else:
            out.append((f"{START}{m['role']}\n{m['content']}{END}\n", False))
    if generation_prompt:
        out.append((f"{START}assistant\n", False))
    return out
