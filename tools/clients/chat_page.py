"""Tries the chat page of a running server in headless Chromium:
`python tools/clients/chat_page.py [URL] [--key KEY] [--shots FOLDER] [--pictures FOLDER]`.

Needs the package `playwright` and a Chromium of the system; without them the script says so and ends well.
Half of the tests ask the server itself, whose model is expected to be the demo model. The others take the
page from it and put a stand-in behind it (`chat_stand_in.py`).
"""

import argparse
import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from chat_stand_in import HOSTILE, HOSTILE_TEX, WIDE, stand_in

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
PICTURE_PHONE = {**PHONE, "viewport": {"width": 390, "height": 844}}


class Tab:
    """A fresh browser profile with the page open, which fails on whatever the console complains about."""

    def __init__(self, browser, url, key=None, locked=False, **options):
        self.context = browser.new_context(**(options or DESKTOP))
        self.page = self.context.new_page()
        self.problems = []
        self.origins = set()
        # Violations of the policy that the console may not tell.
        self.page.add_init_script(
            "window.violations = []; addEventListener('securitypolicyviolation',"
            " (e) => violations.push(`${e.violatedDirective}: ${e.blockedURI} ${e.sample}`))"
        )
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
            violations = self.page.evaluate("window.violations")
            assert violations == [], violations
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
        randomness = dialog.get_by_label("Randomness (temperature)", exact=True)
        # What holds if nothing is set is the model's own.
        defaults = tab.page.evaluate("fetch('/v1/models', {headers: %s}).then((r) => r.json())" % json.dumps(
            {"Authorization": f"Bearer {server.key}"} if server.key else {}))["data"][0]["ferrum"]["defaults"]
        expect(randomness).to_have_attribute("placeholder", str(defaults["temperature"]))
        for label, value in [("Randomness (temperature)", "0"), ("Likely share (top-p)", "0.9"), ("Likely number (top-k)", "5"),
                             ("Least likelihood (min-p)", "0.1"), ("Longest answer (max tokens)", "3"), ("Repeatability (seed)", "7")]:
            dialog.get_by_label(label, exact=True).fill(value)
        randomness.fill("9")
        expect(randomness).to_have_attribute("aria-invalid", "true")
        randomness.fill("0")
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


def test_suggestions_suit_the_demo_model(browser, server):
    with Tab(browser, server.url, server.key) as tab:
        expect(tab.page.locator("#suggestions button")).to_have_count(4)
        tab.page.get_by_role("button", name="What is 7 plus 5?").click()
        expect(tab.body()).to_have_text("7 plus 5 is 12.")
        expect(tab.answers().locator(".stats")).to_contain_text("tokens/s")


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
        tab.ask("hostile tex")
        tab.page.reload()
        expect(tab.answers()).to_have_count(4)
        # A frame of the page is nowhere larger than the page, whatever a formula says of its size.
        tab.fits()
        tab.page.get_by_text("Thoughts").first.click()
        expect(tab.answers().nth(1).locator(".error")).to_contain_text("<img src=x")
        messages = tab.page.locator("#messages, #sidebar")
        for attribute in ["href^='javascript'", "onerror", "src"]:
            assert messages.locator(f"[{attribute}]").count() == 0, attribute
        for tag in ["img", "script", "iframe", "b", "style", "object", "form[action]"]:
            assert messages.locator(tag).count() == 0, tag
        links = messages.locator("a").evaluate_all("links => links.map((link) => link.href)")
        assert links and all(re.match("https://(fine|evil).example/", link) for link in links), links
        assert not any("javascript" in link for link in links)
        assert messages.locator("a:not([rel*=noopener])").count() == 0
        time.sleep(0.3)


def test_failures(browser, fake):
    with Tab(browser, fake.url) as tab:
        retries = tab.answers().last.get_by_role("button", name=re.compile("again"))
        tab.ask("failing")
        # One control, not two.
        expect(retries).to_have_count(1)
        tab.ask("too long")
        # What can never fit is not tried again, and the page says what to do.
        expect(tab.answers().last.locator(".error")).to_contain_text("Shorten a message")
        expect(retries).to_have_count(0)
        # What to do next stands under the words, not beside their edge.
        words = tab.answers().last.locator(".error span").bounding_box()
        button = tab.answers().last.get_by_role("button", name="New chat")
        inside = button.evaluate("e => parseFloat(getComputedStyle(e).paddingInlineStart)")
        assert button.bounding_box()["y"] > words["y"], words
        assert abs(button.bounding_box()["x"] + inside - words["x"]) < 1, words
        button.click()
        expect(tab.answers()).to_have_count(0)
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


def test_rich_answers(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("rich")
        body = tab.body()
        expect(body.locator("math")).to_have_count(4)
        expect(body.locator(".formula > math mfrac")).to_have_count(2)
        assert "\\" not in body.inner_text() and "costs $5 and a pen $2" in body.inner_text()
        assert body.locator(".formula").first.bounding_box()["height"] > 30
        colour = "e => getComputedStyle(e).color"
        words = {name: body.locator(f".code-{name}").first.evaluate(colour) for name in ["keyword", "comment", "number", "title"]}
        assert len(set(words.values())) == 4, words
        expect(body.locator("pre").first).to_have_text("def area(r):\n    # of a circle\n    return 3.14 * r ** 2", use_inner_text=True)
        expect(body.locator("pre").last).to_have_text("plain <b>text</b>")
        boxes = body.get_by_role("checkbox")
        assert [boxes.nth(i).is_checked() for i in range(2)] == [True, False]
        expect(boxes.first).to_be_disabled()
        body.get_by_role("button", name="Footnote 1").click()
        note = body.locator(".notes li")
        expect(note).to_be_focused()
        expect(note).to_contain_text("It is here.")
        note.get_by_role("button", name="Back to the text").click()
        expect(body.get_by_role("button", name="Footnote 1")).to_be_focused()


def test_bullets(browser, fake):
    """As everywhere: a disc, then a circle, then a square, though the messages are a list themselves."""
    with Tab(browser, fake.url) as tab:
        tab.ask("rich")
        expect(tab.body()).to_contain_text("three")
        shown = "all => all.filter((e) => /^(one|two|three)/.test(e.innerText)).map((e) => getComputedStyle(e).listStyleType)"
        marks = tab.body().locator("li").evaluate_all(shown)
        assert marks == ["disc", "circle", "square"], marks


def test_context_meter(browser, fake):
    """What is taken fills the track from top to bottom."""
    with Tab(browser, fake.url) as tab:
        tab.ask("one")
        track = tab.page.locator("#context-meter")
        expect(track.locator("> *")).to_have_count(1)
        outer, inner = track.bounding_box(), track.locator("> *").bounding_box()
        assert (outer["y"], outer["height"]) == (inner["y"], inner["height"]), (outer, inner)
        assert 0 < inner["width"] < outer["width"] / 2
        expect(track).to_have_attribute("aria-valuenow", "0.03")


def test_gaps(browser, fake):
    """An answer stands nearer to its question than the next question to the answer."""
    with Tab(browser, fake.url) as tab:
        tab.ask("one")
        tab.ask("two")
        bubbles, body = tab.page.locator(".bubble"), tab.body(0).bounding_box()
        first, second = bubbles.first.bounding_box(), bubbles.last.bounding_box()
        bar = tab.answers().first.locator(".bar").bounding_box()
        to_answer, to_next = body["y"] - first["y"] - first["height"], second["y"] - bar["y"] - bar["height"]
        assert 8 <= to_answer < to_next <= 48, (to_answer, to_next)
    with Tab(browser, fake.url, **PHONE) as tab:
        tab.ask("one")
        tab.ask("two")
        bars = tab.page.locator(".message .bar")
        boxes = [bars.nth(i).bounding_box() for i in range(3)]
        to_answer = tab.body(0).bounding_box()["y"] - boxes[0]["y"] - boxes[0]["height"]
        to_next = tab.page.locator(".bubble").last.bounding_box()["y"] - boxes[1]["y"] - boxes[1]["height"]
        assert 0 <= to_answer < to_next, (to_answer, to_next)


def test_every_answer_has_a_rate(browser, fake):
    with Tab(browser, fake.url) as tab:
        for text in ["short", "think", "tool", "cut"]:
            tab.ask(text)
            expect(tab.answers().last.locator(".stats")).to_contain_text("tokens/s")


def test_suggestions(browser, fake):
    with Tab(browser, fake.url) as tab:
        prompts = tab.page.locator("#suggestions button")
        expect(prompts).to_have_count(4)
        words = prompts.first.inner_text()
        prompts.first.click()
        expect(tab.body()).to_have_text(f"You said: {words}")
        expect(prompts.first).to_be_hidden()


def test_defaults_are_shown(browser, fake):
    with Tab(browser, fake.url) as tab:
        expect(tab.page.locator("#welcome-model")).to_have_text("stand-in")
        tab.page.keyboard.press("Control+,")
        for label, value in [("Randomness (temperature)", "0.7"), ("Likely share (top-p)", "0.95"), ("Likely number (top-k)", "40"),
                             ("Least likelihood (min-p)", "0"), ("Longest answer (max tokens)", "no limit"),
                             ("Repeatability (seed)", "random")]:
            expect(tab.page.get_by_label(label, exact=True)).to_have_attribute("placeholder", value)


def test_search(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("red foxes")
        tab.ask("blue <b>whales</b>")
        tab.page.keyboard.press("Control+Shift+O")
        tab.ask("green frogs")
        tab.page.keyboard.press("Control+k")
        query = tab.page.get_by_role("combobox", name="Search in conversations")
        expect(query).to_be_focused()
        found = tab.page.locator("#found").get_by_role("option")
        expect(found).to_have_count(2)
        query.fill("nothing like it")
        expect(found).to_have_count(0)
        expect(tab.page.get_by_text("Nothing fits.")).to_be_visible()
        query.fill("WHALES said")
        expect(found).to_have_count(1)
        expect(found.locator("mark")).to_have_text(["said", "whales"])
        expect(found.locator(".found-text")).to_contain_text("You said: blue <b>whales</b>")
        query.press("Enter")
        expect(query).to_be_hidden()
        expect(tab.body()).to_have_text("You said: blue <b>whales</b>")
        expect(tab.page.locator(".found")).to_have_count(1)
        # A message on another branch is shown, too.
        tab.page.get_by_role("button", name="Edit and send again").first.click()
        tab.page.get_by_label("Edit the message").fill("yellow birds")
        tab.page.get_by_label("Edit the message").press("Enter")
        expect(tab.body()).to_have_text("You said: yellow birds")
        tab.page.get_by_role("button", name="Search").click()
        query.fill("blue")
        query.press("ArrowDown")
        found.first.click()
        expect(tab.body()).to_have_text("You said: blue <b>whales</b>")


def test_export_and_import(browser, fake):
    with Tab(browser, fake.url) as tab:
        tab.ask("kept")
        tab.page.keyboard.press("Control+Shift+O")
        tab.ask("other")
        tab.page.keyboard.press("Control+,")
        with tab.page.expect_download() as download:
            tab.page.get_by_role("button", name="Export all").click()
        exported = Path(download.value.path()).read_bytes()
        assert re.fullmatch(r"ferrum-conversations-\d{4}-\d\d-\d\d\.json", download.value.suggested_filename)
        with tab.page.expect_download() as download:
            tab.page.get_by_role("button", name="Export this one").click()
        one = json.loads(Path(download.value.path()).read_bytes())["conversations"]
        assert [[node["content"] for node in chat["nodes"]] for chat in one] == [["other", "You said: other"]]
    with Tab(browser, fake.url) as tab:
        tab.page.keyboard.press("Control+,")

        def bring(data):
            tab.page.locator("#import-file").set_input_files({"name": "x.json", "mimeType": "application/json", "buffer": data})

        words = tab.page.locator("#exchange-words")
        bring(exported)
        expect(words).to_have_text("2 conversations were imported.")
        bring(exported)
        expect(words).to_have_text("0 conversations were imported. 2 were here already.")
        for data in [b"{", b"[]", b"\xff\x00", json.dumps({"format": "ferrum.conversations", "version": 2, "conversations": []}).encode()]:
            bring(data)
            expect(words).to_contain_text("Nothing was imported.")
        hostile = json.loads(exported)
        chat = hostile["conversations"][0]
        chat.update(id="hostile", title="<img src=x onerror=window.pwned=1>")
        chat["nodes"][1]["content"] = HOSTILE + HOSTILE_TEX
        hostile["conversations"] += [None, {"id": "__proto__", "nodes": []}, {"id": "../../x", "nodes": chat["nodes"]}]
        bring(json.dumps(hostile).encode())
        expect(words).to_have_text("1 conversation was imported. 1 was here already. 3 could not be read.")
        tab.page.keyboard.press("Escape")
        names = tab.page.locator(".chat-name")
        expect(names).to_have_count(3)
        names.filter(has_text="kept").click()
        expect(tab.body()).to_have_text("You said: kept")
        tab.page.reload()
        expect(tab.body()).to_have_text("You said: kept")
        names.filter(has_text="<img").click()
        expect(tab.body()).to_contain_text("<script>window.pwned = 1</script>")
        assert tab.stored() == 3


def test_files_go_into_the_prompt(browser, fake):
    with Tab(browser, fake.url) as tab:
        chooser = tab.page.locator("#choose-files")
        files = tab.page.locator("#attachments li")
        code = "def f():\n    return '```'\n"
        chooser.set_input_files({"name": "tool.py", "mimeType": "text/x-python", "buffer": code.encode()})
        expect(files).to_have_text([re.compile("tool.py.*26 B")])
        put = (
            "([kind, name, data]) => { const transfer = new DataTransfer(); transfer.items.add(new File([data], name));"
            " const options = { bubbles: true, cancelable: true, dataTransfer: transfer, clipboardData: transfer };"
            " const event = kind === 'paste' ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);"
            " document.getElementById('entry').dispatchEvent(event); return event.defaultPrevented; }"
        )
        assert tab.page.evaluate(put, ["dragover", "x", ""])
        expect(tab.page.locator("#drop-here")).to_be_visible()
        assert tab.page.evaluate(put, ["drop", "notes <1>.txt", "dropped words"])
        expect(tab.page.locator("#drop-here")).to_be_hidden()
        expect(files).to_have_count(2)
        assert tab.page.evaluate(put, ["paste", "unwanted.csv", "a,b"])
        expect(files).to_have_count(3)
        tab.page.get_by_role("button", name="Remove unwanted.csv").click()
        expect(files).to_have_count(2)
        for name, data, fault in [("photo.png", b"\x89PNG\0", "photo.png is not a text file"), ("big.txt", b"x" * 300_000, "big.txt is too large")]:
            chooser.set_input_files({"name": name, "mimeType": "text/plain", "buffer": data})
            expect(tab.page.locator("#toast")).to_contain_text(fault)
        expect(files).to_have_count(2)
        tab.ask("What is in these?")
        wanted = f"What is in these?\n\n````python tool.py\n{code}````\n\n```text notes _1_.txt\ndropped words\n```"
        assert fake.requests[-1]["messages"] == [{"role": "user", "content": wanted}], fake.requests[-1]
        bubble = tab.page.locator(".bubble")
        expect(bubble.locator(".code-head span")).to_have_text(["tool.py", "notes _1_.txt"])
        expect(bubble.locator(".code-keyword").first).to_have_text("def")
        expect(bubble).not_to_contain_text("```python")
        expect(files).to_have_count(0)
        # Files alone are a message as well.
        tab.page.keyboard.press("Control+Shift+O")
        chooser.set_input_files({"name": "alone.md", "mimeType": "text/markdown", "buffer": b"# Hi"})
        tab.page.get_by_role("button", name="Send", exact=True).click()
        expect(tab.answers()).to_have_count(1)
        expect(tab.page.locator(".chat-name").first).to_have_text(re.compile("alone.md"))


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
    for kind, options in [("desktop", DESKTOP), ("phone", PICTURE_PHONE)]:
        for theme in ["light", "dark"]:
            with Tab(browser, fake.url, color_scheme=theme, **options) as tab:
                def shot(name):
                    tab.page.mouse.move(0, 0)
                    time.sleep(0.2)
                    tab.page.screenshot(path=folder / f"{kind}-{theme}-{name}.png")

                def fresh():
                    if kind == "phone":
                        tab.page.get_by_role("button", name="Conversations").tap()
                    tab.page.locator("#new-chat").click()

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
                tab.ask("rich")
                shot("rich-end")
                tab.page.locator("#scroller").evaluate("e => e.scrollTo(0, 0)")
                shot("rich")
                fresh()
                tab.page.locator("#choose-files").set_input_files(
                    [{"name": name, "mimeType": "text/plain", "buffer": b"def f():\n    return 1\n"} for name in ["tool.py", "notes.txt"]])
                expect(tab.page.locator("#attachments li")).to_have_count(2)
                tab.entry.fill("What do these do?")
                shot("files")
                tab.page.get_by_role("button", name="Send", exact=True).click()
                expect(tab.answers().locator(".stats")).to_contain_text("20 tokens")
                tab.ask("too long")
                shot("failure")
                fresh()
                for text in ["think", "tool"]:
                    tab.ask(text)
                tab.page.get_by_text("Thoughts").first.click()
                shot("tools")
                fresh()
                tab.ask("cut")
                tab.answers().last.get_by_role("button", name=re.compile("again")).click()
                tab.ask("slow", wait=False)
                expect(tab.body()).to_contain_text("word 12")
                shot("running")
                tab.page.keyboard.press("Escape")
                if kind == "phone":
                    tab.page.get_by_role("button", name="Conversations").tap()
                    shot("sidebar")
                    tab.page.keyboard.press("Escape")
                tab.page.get_by_role("button", name="Settings", exact=True).click()
                tab.page.get_by_label("Randomness").fill("0.5")
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
                tab.page.keyboard.press("Escape")
                tab.page.keyboard.press("Control+k")
                tab.page.get_by_role("combobox", name="Search in conversations").fill("what")
                shot("search")


def take_pictures(browser, server, folder):
    """The pictures of the README: a real conversation with the demo model."""
    chats = [["Count from 3 to 9."], ["Tell me a story about a dragon."], ["What sound does a cow make?"], ["What is 7 plus 5?"],
             ["What is the capital of France?", "Tell me a story about a fox.", "What is 12 minus 4?"]]
    folder.mkdir(parents=True, exist_ok=True)
    for theme in ["light", "dark"]:
        with Tab(browser, server.url, server.key, color_scheme=theme, viewport={"width": 1200, "height": 780}) as tab:
            for prompts in chats:
                tab.page.locator("#new-chat").click()
                for prompt in prompts:
                    tab.ask(prompt)
            tab.page.mouse.move(0, 0)
            time.sleep(0.5)
            tab.page.screenshot(path=folder / f"chat-{theme}.png")


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
    arguments.add_argument("--pictures", type=Path)
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
        if options.pictures:
            return take_pictures(browser, server, options.pictures)
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
