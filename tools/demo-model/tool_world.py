"""Tools that do not exist, with questions that need them and results they might give.

Names, parameter names and result keys vary, so the model has to read the schema it is given.
"""

from dataclasses import dataclass
from random import Random
from typing import Callable

import world
from stories import HE_NAMES, SHE_NAMES, nonsense

PEOPLE = HE_NAMES + SHE_NAMES
WEATHER = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear"]
WORDS = ["house", "tree", "water", "friend", "bread", "sun", "moon", "book", "street", "flower", "dog", "cat"]
LANGUAGES = ["German", "French", "Spanish", "Italian", "Polish", "Swedish"]
ROOMS = ["kitchen", "bedroom", "bathroom", "garage", "hall", "office", "garden", "cellar"]
SONGS = ["Blue River", "Summer Rain", "Old Road", "Morning Light", "Silver Moon", "Wild Wind", "Golden Days"]
MESSAGES = ["I am late", "see you soon", "dinner is ready", "good night", "call me back", "the train is here", "happy birthday"]
EVENTS = ["lunch", "a meeting", "a party", "a dentist visit", "a football game", "a walk", "a piano lesson"]
ITEMS = ["bread", "milk", "a lamp", "a chair", "a bicycle", "a phone", "a coat", "tea", "a laptop", "shoes"]
TOPICS = ["black holes", "Roman history", "jazz", "volcanoes", "chess", "whales", "steam engines", "robots", "gardening"]


@dataclass(frozen=True)
class Tool:
    """`ask` gives (question, arguments), `reply` gives (result, final sentence)."""

    names: tuple
    about: str
    params: tuple  # of (names, type, description)
    ask: Callable
    reply: Callable


def place(rng: Random) -> str:
    return nonsense(rng).capitalize() if rng.random() < 0.3 else rng.choice(world.CITIES)


def person(rng: Random) -> str:
    return nonsense(rng).capitalize() if rng.random() < 0.25 else rng.choice(PEOPLE)


def _weather(rng, a):
    t, c = rng.randint(-9, 39), rng.choice(WEATHER)
    key = rng.choice(["condition", "weather", "sky"])
    return {"temperature": t, key: c}, f"It is {t} degrees and {c} in {a[0]}."


def _time(rng, a):
    t = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"time": t}, f"It is {t} in {a[0]}."


def _price(rng, a):
    p = rng.randint(1, 999)
    return {"price": p, "currency": "euros"}, f"The price of {a[0]} is {p} euros."


def _calculate(sign, word, compute):
    def ask(rng):
        a, b = rng.randint(1, 999), rng.randint(1, 99)
        return rng.choice([f"What is {a} {word} {b}?", f"How much is {a} {word} {b}?", f"Calculate {a} {sign} {b}.", f"{a} {sign} {b}"]), (a, b)

    def reply(rng, v):
        return {"result": compute(*v)}, f"{v[0]} {word} {v[1]} is {compute(*v)}."

    return ask, reply


_ok = lambda rng: {rng.choice(["status", "result"]): rng.choice(["ok", "done", "success"])}
_two = lambda value, *templates: (lambda rng: (lambda v: (rng.choice(templates).format(*v), v))(value(rng)))

TOOLS = [
    Tool(("get_weather", "weather", "current_weather", "fetch_weather"), "Get the current weather.",
         ((("city", "location", "place"), "string", "Name of the city"),),
         _two(lambda r: (place(r),), "What is the weather in {0}?", "How is the weather in {0}?", "Is it warm in {0} today?", "Tell me the weather in {0}.", "Weather in {0}?"),
         _weather),
    Tool(("get_time", "current_time", "clock"), "Get the current time.",
         ((("city", "location", "timezone"), "string", "Name of the city"),),
         _two(lambda r: (place(r),), "What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"), _time),
    Tool(("set_timer", "start_timer", "timer"), "Start a timer.",
         ((("minutes", "duration"), "integer", "Length in minutes"),),
         _two(lambda r: (r.randint(2, 99),), "Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes."),
         lambda r, a: (_ok(r), f"The timer is set for {a[0]} minutes.")),
    Tool(("turn_on_light", "light_on", "switch_light"), "Turn on the light in a room.",
         ((("room", "location"), "string", "Name of the room"),),
         _two(lambda r: (r.choice(ROOMS),), "Turn on the light in the {0}.", "Switch on the {0} light.", "It is dark in the {0}, please make light."),
         lambda r, a: (_ok(r), f"The light in the {a[0]} is on.")),
    Tool(("translate", "translate_word", "dictionary"), "Translate a word.",
         ((("word", "text"), "string", "Word to translate"), (("language", "target", "to"), "string", "Target language")),
         _two(lambda r: (r.choice(WORDS), r.choice(LANGUAGES)), "Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?"),
         lambda r, a: (lambda w: ({"translation": w}, f"In {a[1]}, {a[0]} is {w}."))(nonsense(r))),
    Tool(("send_message", "message", "send_text"), "Send a message to a person.",
         ((("to", "recipient", "person"), "string", "Who gets the message"), (("text", "body", "message"), "string", "What to say")),
         _two(lambda r: (person(r), r.choice(MESSAGES)), "Send a message to {0}: {1}.", "Write {0} this message: {1}.", "Send {0} the text: {1}."),
         lambda r, a: (_ok(r), f"I sent the message to {a[0]}.")),
    Tool(("play_music", "play_song", "music"), "Play a song.",
         ((("song", "title", "track"), "string", "Title of the song"),),
         _two(lambda r: (r.choice(SONGS),), "Play {0}.", "Please play the song {0}.", "I want to hear {0}."),
         lambda r, a: (_ok(r), f"Now playing {a[0]}.")),
    Tool(("create_event", "add_event", "calendar_add"), "Put an event into the calendar.",
         ((("title", "event", "name"), "string", "What happens"), (("day", "date"), "string", "Day of the week")),
         _two(lambda r: (r.choice(EVENTS), r.choice(world.DAYS)), "Plan {0} on {1}.", "Put {0} into my calendar for {1}.", "I have {0} on {1}, please note it."),
         lambda r, a: (_ok(r), f"I put {a[0]} into your calendar for {a[1]}.")),
    Tool(("get_price", "price", "lookup_price"), "Look up the price of an item.",
         ((("item", "product", "article"), "string", "What to buy"),),
         _two(lambda r: (r.choice(ITEMS),), "How much does {0} cost?", "What is the price of {0}?", "Look up the price of {0}."), _price),
    Tool(("search", "web_search", "search_web"), "Search the web.",
         ((("query", "q", "topic"), "string", "What to search for"),),
         _two(lambda r: (r.choice(TOPICS),), "Search for {0}.", "Search the web for {0}.", "Look up {0} on the web."),
         lambda r, a: (lambda n: ({"results": n}, f"I found {n} results about {a[0]}."))(r.randint(2, 99))),
    Tool(("add", "sum", "add_numbers"), "Add two numbers.",
         ((("a", "x", "first"), "number", "First number"), (("b", "y", "second"), "number", "Second number")),
         *_calculate("+", "plus", lambda a, b: a + b)),
    Tool(("multiply", "times", "multiply_numbers"), "Multiply two numbers.",
         ((("a", "x", "first"), "number", "First number"), (("b", "y", "second"), "number", "Second number")),
         *_calculate("*", "times", lambda a, b: a * b)),
]


@dataclass(frozen=True)
class Offer:
    """A tool under one concrete name, with concrete parameter names: what the system message lists."""

    tool: Tool
    name: str
    params: tuple

    def schema(self) -> dict:
        properties = {p: {"type": t, "description": d} for p, (_, t, d) in zip(self.params, self.tool.params)}
        return {"type": "function", "function": {
            "name": self.name, "description": self.tool.about,
            "parameters": {"type": "object", "properties": properties, "required": list(self.params)}}}


def offers(rng: Random, count: int) -> list:
    chosen = []
    for tool in rng.sample(TOOLS, count):
        params = []
        for names, _, _ in tool.params:
            params.append(rng.choice([n for n in names if n not in params]))
        chosen.append(Offer(tool, rng.choice(tool.names), tuple(params)))
    return chosen
