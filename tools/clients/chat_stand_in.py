"""A server for `chat_page.py` that misbehaves as no real model can be told to: what it answers is told by the last
message of the user.
"""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOSTILE = (
    '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">\n\n'
    "[a](javascript:window.pwned=1) [b](data:text/html,<script>1</script>) [c](//evil.example/x) "
    "[d](https://fine.example/?q=1) ![e](https://evil.example/pixel.png) <https://fine.example/two>\n\n"
    "<svg onload=window.pwned=1><a href='javascript:window.pwned=1'>x</a>\n\n"
    "| <b>h</b> |\n|---|\n| <img src=x onerror=window.pwned=1> |\n\n```<img onerror=1>\n</code></pre><script>window.pwned=1</script>\n```\n"
)
HOSTILE_TEX = (
    r"$\href{javascript:window.pwned=1}{x}$ $\url{javascript:1}$ \(\includegraphics{https://evil.example/p.png}\) "
    r"$\htmlStyle{position:fixed}{x}$ $\pmb{x} \colorbox{red}{y} \cancel{z} {}_a^b x$ $\class{sr}{x}$ $\text{<img src=x onerror=window.pwned=1>}$ "
    "\n\n" + r"$$\def\a{\a\a}\a$$" + "\n\n" + r"\[\rule{9999em}{9999em} \kern{-9999em} x\]" + "\n\n[^1]: <script>window.pwned=1</script>\n\n"
    "- [x] <img src=x onerror=window.pwned=1> [^1]\n"
)
RICH = (
    "The area is \\(\\pi r^2\\), and $e^{i\\pi} + 1 = 0$ costs nothing; a book costs $5 and a pen $2.\n\n"
    "\\[\nx = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}\n\\]\n\nSo\n$$\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$$\n\n"
    "```python\ndef area(r):\n    # of a circle\n    return 3.14 * r ** 2\n```\n\n```nonsense\nplain <b>text</b>\n```\n\n"
    "- [x] Measure\n- [ ] Cut\n\n- one\n  - two\n    - three\n\nSee the note.[^a]\n\n[^a]: It is *here*.\n"
)
WIDE = (
    "# A heading\n\nSome **bold** and *slanted* words, `code`, and a [link](https://example.com/).\n\n"
    "1. First\n2. Second\n   - nested\n\n> A quotation.\n\n"
    "```python\ndef long_line(): return 'x' * 100 + 'y' * 100 + 'z' * 100 + 'and so on, far beyond a phone'\n```\n\n"
    "| Column one | Column two | Column three | Column four | Column five |\n|---|---|--:|---|---|\n"
    "| some words | more words | 12,345 | words again | and the last |\n\n" + "unbreakable" * 20
)


class StandIn(BaseHTTPRequestHandler):
    """A server whose answers are told by the last message of the user."""

    protocol_version = "HTTP/1.1"
    page = (b"", {})
    key = None
    requests = []
    tries = {}

    def log_message(self, *_):
        pass

    def send(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, status, value, headers=()):
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **dict(headers)})

    def fail(self, status, message, headers=(), code=None):
        self.send_json(status, {"error": {"message": message, "type": "x", "param": None, "code": code}}, headers)

    def is_locked(self):
        return self.key is not None and self.headers.get("Authorization") != f"Bearer {self.key}"

    def do_GET(self):
        if self.path == "/":
            body, headers = self.page
            return self.send(401 if self.is_locked() else 200, body, headers)
        if self.is_locked():
            return self.fail(401, "the API key is not one of this server's")
        if self.path == "/v1/models":
            names = ["stand-in", '<img src=x onerror="window.pwned = 1">']
            defaults = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0}
            one = {"max_model_len": 4096, "ferrum": {"defaults": defaults}}
            return self.send_json(200, {"data": [{"id": name, **one} for name in names]})
        self.fail(404, "there is nothing")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_locked():
            return self.fail(401, "the API key is not one of this server's")
        self.requests.append(body)
        said = [m["content"] for m in body["messages"] if m["role"] == "user"][-1]
        self.tries[said] = self.tries.get(said, 0) + 1
        if said == "busy" and self.tries[said] == 1:
            return self.fail(429, "too many requests wait", {"Retry-After": "1"})
        if said == "too long":
            return self.fail(400, "This model's maximum context length is 4096 tokens. However, your prompt has 5000 tokens.", code="context_length_exceeded")
        if said == "hostile error":
            return self.fail(500, '<img src=x onerror="window.pwned = 1">')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.answer(said, body)
        except (BrokenPipeError, ConnectionResetError):
            self.tries["gone"] = self.tries.get("gone", 0) + 1

    def event(self, value):
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def delta(self, finish=None, **delta):
        self.event({"model": "stand-in", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def answer(self, said, body):
        self.delta(role="assistant", content="")
        if said == "slow":
            for i in range(600):
                self.delta(content=f"word {i} ")
                time.sleep(0.05)
        elif said == "cut":
            self.delta(content="A beginning")
            if self.tries[said] == 1:
                return
        elif said == "failing":
            self.delta(content="A beginning")
            return self.event({"error": {"message": "the engine has failed"}})
        elif said == "think":
            for word in "First this then that".split():
                self.delta(reasoning_content=word + " ")
                time.sleep(0.05)
            self.delta(content="Thought through.")
        elif said == "rich":
            for at in range(0, len(RICH), 9):
                self.delta(content=RICH[at : at + 9])
        elif said == "hostile tex":
            for at in range(0, len(HOSTILE_TEX), 9):
                self.delta(content=HOSTILE_TEX[at : at + 9])
        elif said == "hostile":
            self.delta(reasoning_content=HOSTILE)
            for at in range(0, len(HOSTILE), 7):
                self.delta(content=HOSTILE[at : at + 7])
            function = {"name": "<img src=x onerror=window.pwned=1>", "arguments": json.dumps({"x": HOSTILE})}
            self.delta(tool_calls=[{"index": 0, "id": "c", "type": "function", "function": function}])
        elif said == "tool" and body["messages"][-1]["role"] == "user":
            self.delta(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": ""}}])
            for piece in ['{"ci', 'ty": "Pa', 'ris"}']:
                self.delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}])
            self.delta(finish="tool_calls")
        elif said == "wide":
            for at in range(0, len(WIDE), 11):
                self.delta(content=WIDE[at : at + 11])
                time.sleep(0.001)
        elif said == "long":
            for i in range(80):
                self.delta(content=f"Paragraph {i}.\n\n")
        else:
            self.delta(content=f"You said: {said}")
        self.delta(finish="stop")
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 64}}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def stand_in(page, key=None):
    handler = type("Handler", (StandIn,), {"page": page, "key": key, "requests": [], "tries": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield handler
    finally:
        server.shutdown()
