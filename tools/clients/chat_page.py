"""Tries the chat page of a running server in headless Chromium:
`python tools/clients/chat_page.py [URL] [--key KEY] [--shots FOLDER]`.

Needs the package `playwright` and a Chromium of the system; without them the script says so and ends well.
Half of the tests ask the server itself, whose model is expected to be the demo model. The others take the
page from it and put a stand-in behind it that misbehaves as no real model can be told to.
"""

import argparse
import json
import re
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    print("skipped: the package `playwright` is not installed")
    sys.exit(0)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
DESKTOP = {"viewport": {"width": 1280, "height": 800}}

HOSTILE = (
    '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">\n\n'
    "[a](javascript:window.pwned=1) [b](data:text/html,<script>1</script>) [c](//evil.example/x) "
    "[d](https://fine.example/?q=1) ![e](https://evil.example/pixel.png) <https://fine.example/two>\n\n"
    "<svg onload=window.pwned=1><a href='javascript:window.pwned=1'>x</a>\n\n"
    "| <b>h</b> |\n|---|\n| <img src=x onerror=window.pwned=1> |\n\n```<img onerror=1>\n</code></pre><script>window.pwned=1</script>\n```\n"
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

    def fail(self, status, message, headers=()):
        self.send_json(status, {"error": {"message": message, "type": "x", "param": None, "code": None}}, headers)

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
            return self.send_json(200, {"data": [{"id": name, "max_model_len": 4096} for name in names]})
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


class Tab:
    """A fresh browser profile with the page open, which fails on whatever the console complains about."""

    def __init__(self, browser, url, key=None, locked=False, **options):
        self.context = browser.new_context(**(options or DESKTOP))
        self.page = self.context.new_page()
        self.problems = []
        self.origins = set()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self.note)
        self.page.on("request", lambda request: self.origins.add(re.match(r"\w+:(//[^/]*)?", request.url)[0]))
        self.origin = url.rstrip("/")
        self.page.goto(url)
        if key and not locked:
            self.enter_key(key)

    def note(self, message):
        # Statuses that a test asks for are logged by the browser itself.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            assert not self.problems, self.problems
            assert self.origins <= {self.origin, "data:"}, self.origins
            assert self.page.evaluate("window.pwned") is None
        self.context.close()

    def enter_key(self, key, remember=False):
        self.page.get_by_label("API key").fill(key)
        if remember:
            self.page.get_by_label("Keep it in this browser").check()
        self.page.get_by_role("button", name="Continue").click()

    @property
    def entry(self):
        return self.page.get_by_role("textbox", name="Message", exact=True)

    def ask(self, text, wait=True):
        self.entry.fill(text)
        self.entry.press("Control+Enter")
        if wait:
            expect(self.page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=60_000)

    def answers(self):
        return self.page.locator(".message.assistant")

    def body(self, nth=-1):
        return self.answers().nth(nth).locator(".body").last

    def stored(self):
        return self.page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('ferrum.chat.')).length")

    def fits(self):
        width, room = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room, f"{width} px in {room}"


# ---- With the model of the server

def test_stream(browser, server):
    with Tab(browser, server.url, server.key) as tab:
        tab.ask("What is 7 plus 5?")
        expect(tab.body()).to_have_text("7 plus 5 is 12.")
        expect(tab.answers().locator(".stats")).to_contain_text("tokens")
        expect(tab.page.locator("#context-words")).to_contain_text("/")
        expect(tab.page).to_have_title(re.compile("What is 7 plus 5"))
        tab.page.reload()
        expect(tab.body()).to_have_text("7 plus 5 is 12.")
        tab.ask("What is 2 plus 2?")
        expect(tab.body()).to_contain_text("4")
        assert tab.answers().count() == 2


def test_settings_reach_the_request(browser, server):
    with Tab(browser, server.url, server.key) as tab:
        sent = []
        tab.page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
        tab.page.keyboard.press("Control+,")
        dialog = tab.page.get_by_role("dialog", name="Settings")
        dialog.get_by_label("System prompt").fill("Be brief.")
        for label, value in [("Temperature", "0"), ("Top-p", "0.9"), ("Top-k", "5"), ("Min-p", "0.1"),
                             ("Most tokens", "3"), ("Seed", "7")]:
            dialog.get_by_label(label, exact=True).fill(value)
        dialog.get_by_label("Temperature").fill("9")
        expect(dialog.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
        dialog.get_by_label("Temperature").fill("0")
        tab.page.keyboard.press("Escape")
        tab.ask("Once upon a time")
        (request,) = sent
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}, request
        wanted = {"temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 3, "seed": 7}
        assert {name: request[name] for name in wanted} == wanted, request
        expect(tab.answers().locator(".note")).to_contain_text("limit of tokens")
        expect(tab.page.locator("#summary")).to_contain_text("temperature 0")
        tab.page.reload()
        tab.ask("Once upon a time")
        assert sent[1]["seed"] == 7


def test_a_tool_is_called(browser, server):
    with Tab(browser, server.url, server.key) as tab:
        tab.page.get_by_role("button", name="Settings", exact=True).click()
        tab.page.get_by_role("button", name="Example").click()
        tab.page.keyboard.press("Escape")
        tab.ask("What is the weather in Paris?")
        expect(tab.answers().locator(".calls pre")).to_contain_text('"city": "Paris"')
        tab.page.get_by_label("Result of get_weather").fill('{"weather": "sunny"}')
        tab.page.get_by_role("button", name="Send result").click()
        expect(tab.answers()).to_have_count(2)
        expect(tab.body()).not_to_be_empty(timeout=60_000)


# ---- With a stand-in behind the page

def test_stop(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("slow", wait=False)
        expect(tab.body()).to_contain_text("word 3")
        tab.page.get_by_role("button", name="Stop", exact=True).click()
        expect(tab.answers().locator(".note")).to_have_text("Stopped.")
        words = tab.body().inner_text()
        time.sleep(0.3)
        assert tab.body().inner_text() == words
        for _ in range(40):
            if fake.tries.get("gone"):
                break
            time.sleep(0.1)
        assert fake.tries.get("gone"), "the server was not told"


def test_edit_and_versions(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("one")
        tab.ask("two")
        tab.page.get_by_role("button", name="Edit and send again").first.click()
        area = tab.page.get_by_label("Edit the message")
        area.fill("changed")
        area.press("Enter")
        expect(tab.body()).to_have_text("You said: changed")
        expect(tab.answers()).to_have_count(1)
        expect(tab.page.locator(".message.user .versions span")).to_have_text("2/2")
        tab.page.get_by_role("button", name="Previous version").first.click()
        expect(tab.answers()).to_have_count(2)
        expect(tab.body()).to_have_text("You said: two")
        assert [m["content"] for m in fake.requests[-1]["messages"]] == ["changed"]
        tab.page.get_by_role("button", name="Answer again").last.click()
        expect(tab.answers().last.locator(".versions span")).to_have_text("2/2")
        # An edit that is given up changes nothing.
        tab.page.get_by_role("button", name="Edit and send again").first.click()
        tab.page.keyboard.press("Escape")
        expect(tab.page.locator(".bubble").first).to_have_text("one")


def test_conversations(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("first")
        tab.page.get_by_role("button", name="New chat").first.click()
        tab.ask("second")
        names = tab.page.locator(".chat-name")
        expect(names).to_have_text(["second", "first"])
        names.last.click()
        expect(tab.body()).to_have_text("You said: first")
        tab.page.get_by_role("button", name="Rename: first").click()
        field = tab.page.get_by_label("Name of the conversation")
        field.fill("renamed")
        field.press("Enter")
        expect(names.filter(has_text="renamed")).to_have_count(1)
        tab.page.get_by_role("button", name="Delete: renamed").click()
        assert tab.stored() == 1
        tab.page.get_by_role("button", name="Undo").click()
        expect(tab.body()).to_have_text("You said: first")
        assert tab.stored() == 2
        tab.page.go_back()
        tab.page.go_back()
        # An answer goes on while another conversation is open.
        tab.page.get_by_role("button", name="New chat").first.click()
        tab.ask("slow", wait=False)
        expect(tab.body()).to_contain_text("word 1")
        names.filter(has_text="second").click()
        expect(tab.page.get_by_role("img", name="being answered")).to_be_visible()
        tab.ask("third")
        expect(tab.body()).to_have_text("You said: third")
        names.filter(has_text="slow").click()
        expect(tab.body()).to_contain_text("word 9")
        tab.page.keyboard.press("Escape")


def test_reasoning_and_tools(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("think")
        expect(tab.body()).to_have_text("Thought through.")
        tab.page.get_by_text("Thoughts").click()
        expect(tab.page.locator(".thoughts")).to_have_text("First this then that")
        tab.ask("tool")
        expect(tab.answers().last.locator(".calls pre")).to_have_text('{\n  "city": "Paris"\n}')
        result = tab.page.get_by_label("Result of get_weather")
        result.fill('{"weather": "rain"}')
        result.press("Enter")
        expect(tab.body()).to_have_text("You said: tool")
        call, told = fake.requests[-1]["messages"][-2:]
        assert call["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert told == {"role": "tool", "content": '{"weather": "rain"}', "tool_call_id": "call_1"}, told


def test_hostile_answers(browser, fake):
    with Tab(browser, fake.url) as tab:
        for text in ["hostile", "hostile error", '<img src=x onerror="window.pwned = 1">']:
            tab.ask(text)
        tab.page.get_by_text("Thoughts").first.click()
        tab.page.reload()
        expect(tab.answers()).to_have_count(3)
        tab.page.get_by_text("Thoughts").first.click()
        expect(tab.answers().nth(1).locator(".error")).to_contain_text("<img src=x")
        messages = tab.page.locator("#messages, #sidebar")
        for tag in ["img", "script", "iframe", "b", "style", "object", "form[action]"]:
            assert messages.locator(tag).count() == 0, tag
        links = messages.locator("a").evaluate_all("links => links.map((link) => link.href)")
        assert links and all(re.match("https://(fine|evil).example/", link) for link in links), links
        assert not any("javascript" in link for link in links)
        assert messages.locator("a:not([rel*=noopener])").count() == 0
        time.sleep(0.3)


def test_failures(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("cut")
        error = tab.answers().last.locator(".error")
        expect(error).to_contain_text("connection broke")
        expect(tab.body()).to_have_text("A beginning")
        error.get_by_role("button", name="Try again").click()
        expect(tab.body()).to_have_text("A beginning")
        expect(tab.answers().last.locator(".error")).to_be_hidden()
        tab.ask("failing")
        expect(error).to_contain_text("the engine has failed")
        tab.ask("busy")
        expect(error).to_contain_text("Try again in 1 s")
        error.get_by_role("button", name="Try again").click()
        expect(tab.body()).to_have_text("You said: busy")
        tab.context.set_offline(True)
        tab.ask("nobody is there")
        expect(error).to_contain_text("cannot be reached")
        tab.context.set_offline(False)
        error.get_by_role("button", name="Try again").click()
        expect(tab.body()).to_have_text("You said: nobody is there")


def test_key(browser, page):
    with stand_in(page, key="secret") as fake:
        with Tab(browser, fake.url, locked=True) as tab:
            tab.enter_key("wrong")
            expect(tab.page.locator("#key-fault")).to_contain_text("not one of this server's")
            tab.enter_key("a ключ")
            expect(tab.page.locator("#key-fault")).to_contain_text("not one of this server's")
            tab.enter_key("secret")
            expect(tab.page.locator("#key-dialog")).to_be_hidden()
            tab.ask("hello")
            expect(tab.body()).to_have_text("You said: hello")
            assert tab.page.evaluate("localStorage.getItem('ferrum.key')") is None
            tab.page.reload()
            tab.ask("again")
            expect(tab.body()).to_have_text("You said: again")
            # A key that is taken back while the page is open is asked for again.
            fake.key = "other"
            tab.ask("locked out")
            tab.enter_key("other", remember=True)
            tab.page.get_by_role("button", name="Try again").click()
            expect(tab.body()).to_have_text("You said: locked out")
            assert tab.page.evaluate("localStorage.getItem('ferrum.key')") == "other"


def test_keyboard_alone(browser, fake):
    with Tab(browser, fake.url) as tab:
        keys = tab.page.keyboard
        expect(tab.entry).to_be_focused()
        keys.type("one")
        keys.press("Shift+Enter")
        keys.type("line more")
        keys.press("Enter")
        expect(tab.body()).to_have_text("You said: one\nline more", use_inner_text=True)
        expect(tab.entry).to_be_focused()
        expect(tab.page.locator("#announcer")).to_contain_text("Answer: You said")
        keys.press("ArrowUp")
        expect(tab.page.get_by_label("Edit the message")).to_be_focused()
        keys.press("Escape")
        keys.press("Control+Shift+O")
        expect(tab.entry).to_be_focused()
        keys.type("slow")
        keys.press("Enter")
        expect(tab.body()).to_contain_text("word 2")
        keys.press("Escape")
        expect(tab.answers().locator(".note")).to_have_text("Stopped.")
        keys.press("Control+/")
        expect(tab.page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
        keys.press("Escape")
        keys.press("Control+,")
        expect(tab.page.get_by_role("dialog", name="Settings")).to_be_visible()
        keys.press("Escape")
        # From the beginning of the page, Tab reaches everything, and what it reaches has a name.
        tab.page.locator(".skip").focus()
        names = []
        for _ in range(40):
            name = tab.page.evaluate(
                "(e => e === document.body ? null : e.getAttribute('aria-label') || e.labels?.[0]?.innerText"
                " || e.innerText || e.placeholder || '')(document.activeElement)"
            )
            if name is None or name in names[:1]:
                break
            names.append(name.strip())
            keys.press("Tab")
        assert all(names), names
        assert names[0] == "Skip to the message", names
        for wanted in ["New chat", "Delete: slow", "Settings", "Answer again", "Copy", "Message"]:
            assert wanted in names, (wanted, names)


def test_themes(browser, fake):
    ground = "getComputedStyle(document.body).backgroundColor"
    dark, light = "rgb(26, 25, 24)", "rgb(253, 252, 250)"
    with Tab(browser, fake.url, color_scheme="dark", **DESKTOP) as tab:
        assert tab.page.evaluate(ground) == dark
        for theme, colour in [("Light", light), ("Dark", dark), ("System", dark)]:
            tab.page.keyboard.press("Control+,")
            tab.page.get_by_label(theme, exact=True).check(force=True)
            tab.page.keyboard.press("Escape")
            assert tab.page.evaluate(ground) == colour, theme
            tab.page.reload()
            assert tab.page.evaluate(ground) == colour, theme


def test_phone(browser, fake):
    with Tab(browser, fake.url, **PHONE) as tab:
        expect(tab.page.locator("#sidebar")).to_be_hidden()
        tab.fits()
        tab.entry.fill("wide")
        tab.page.get_by_role("button", name="Send", exact=True).tap()
        expect(tab.body().locator("table")).to_be_visible()
        expect(tab.answers().locator(".stats")).to_contain_text("20 tokens")
        tab.fits()
        small = "e => { const { width, height } = e.getBoundingClientRect(); return width && (width < 24 || height < 24); }"
        for button in tab.page.get_by_role("button").all():
            assert not (button.is_visible() and button.evaluate(small)), button.evaluate("e => e.outerHTML")
        tab.page.get_by_role("button", name="Conversations").tap()
        expect(tab.page.locator(".chat-name")).to_be_visible()
        tab.fits()
        tab.page.get_by_role("button", name="New chat").tap()
        expect(tab.page.locator("#sidebar")).to_be_hidden()
        tab.page.get_by_role("button", name="Settings", exact=True).tap()
        tab.fits()
        dialog = tab.page.locator("#settings")
        assert dialog.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_reading_while_it_comes(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("long")
        place = "(e => Math.round(e.scrollHeight - e.scrollTop - e.clientHeight))(document.getElementById('scroller'))"
        assert tab.page.evaluate(place) < 5
        tab.page.locator("#scroller").evaluate("e => e.scrollTo(0, 0)")
        tab.page.get_by_role("button", name="To the end").click()
        assert tab.page.evaluate(place) < 5
        tab.ask("slow", wait=False)
        expect(tab.body()).to_contain_text("word 2")
        tab.page.locator("#scroller").evaluate("e => e.scrollTo(0, 0)")
        expect(tab.body()).to_contain_text("word 9")
        assert tab.page.locator("#scroller").evaluate("e => e.scrollTop") == 0
        tab.page.keyboard.press("Escape")


def test_copy(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
        tab.ask("wide")
        tab.answers().locator(".copy-code").click()
        read = "navigator.clipboard.readText()"
        assert tab.page.evaluate(read).startswith("def long_line()")
        tab.answers().get_by_role("button", name="Copy", exact=True).last.click()
        assert tab.page.evaluate(read) == WIDE


def shoot(browser, fake, folder):
    """Pictures for people to look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, options in [("desktop", DESKTOP), ("phone", PHONE)]:
        for theme in ["light", "dark"]:
            with Tab(browser, fake.url, color_scheme=theme, **options) as tab:
                def shot(name):
                    tab.page.mouse.move(0, 0)
                    time.sleep(0.2)
                    tab.page.screenshot(path=folder / f"{kind}-{theme}-{name}.png")

                def fresh():
                    if kind == "phone":
                        tab.page.get_by_role("button", name="Conversations").tap()
                    tab.page.get_by_role("button", name="New chat").click()

                shot("empty")
                for text in ["Explain continuous batching", "Write a haiku about iron", "What is 7 plus 5?"]:
                    fresh()
                    tab.ask(text)
                fresh()
                tab.ask("wide")
                shot("wide-end")
                tab.page.locator("#scroller").evaluate("e => e.scrollTo(0, 0)")
                shot("wide")
                fresh()
                for text in ["think", "tool"]:
                    tab.ask(text)
                tab.page.get_by_text("Thoughts").first.click()
                shot("tools")
                fresh()
                tab.ask("cut")
                tab.page.get_by_role("button", name="Answer again").click()
                tab.ask("slow", wait=False)
                expect(tab.body()).to_contain_text("word 12")
                shot("running")
                tab.page.keyboard.press("Escape")
                if kind == "phone":
                    tab.page.get_by_role("button", name="Conversations").tap()
                    shot("sidebar")
                    tab.page.keyboard.press("Escape")
                tab.page.get_by_role("button", name="Settings", exact=True).click()
                tab.page.get_by_label("Temperature").fill("0.7")
                tab.page.get_by_role("button", name="Example").click()
                tab.page.locator("#settings").evaluate("e => e.scrollTo(0, 0)")
                shot("settings")
                tab.page.locator("#settings").evaluate("e => e.scrollTo(0, 1e6)")
                shot("settings-end")
                tab.page.get_by_role("button", name="Enter a key").click()
                shot("key")
                tab.page.keyboard.press("Escape")
                tab.page.keyboard.press("Control+/")
                shot("help")


class Server:
    """The server that runs, and its page as a browser gets it."""

    def __init__(self, url, key):
        self.url, self.key = url.rstrip("/") + "/", key
        try:
            answer = urllib.request.urlopen(self.url)
            assert answer.status == 200
        except urllib.error.HTTPError as error:
            # Without a key there is the same page, which asks for one.
            assert error.code == 401 and key, f"{url} answers {error.code}"
            answer = error
        kept = ["Content-Type", "Content-Security-Policy", "Referrer-Policy", "X-Content-Type-Options"]
        self.page = (answer.read(), {name: answer.headers[name] for name in kept})


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    arguments.add_argument("--key")
    arguments.add_argument("--shots", type=Path)
    arguments.add_argument("--only", default="")
    options = arguments.parse_args()
    if CHROMIUM is None:
        print("skipped: there is no Chromium")
        return
    # Long enough for a machine with other things to do.
    expect.set_options(timeout=20_000)
    server = Server(options.url, options.key)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        if options.shots:
            with stand_in(server.page) as fake:
                shoot(browser, fake, options.shots)
        for name, test in list(globals().items()):
            if not name.startswith("test_") or options.only not in name:
                continue
            wanted = test.__code__.co_varnames[1]
            if wanted == "fake":
                with stand_in(server.page) as fake:
                    test(browser, fake)
            else:
                test(browser, {"server": server, "page": server.page}[wanted])
            print(f"ok: {name.removeprefix('test_').replace('_', ' ')}")
        browser.close()


if __name__ == "__main__":
    main()
