"""Tools that do not exist, with questions that need them and results they might give.

The tools on offer and the name of the city's parameter vary, so the model has to read the list it is given.
"""

from dataclasses import dataclass
from random import Random
from typing import Callable

import world

WEATHER = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"]
ROOMS = ["kitchen", "bedroom", "bathroom", "garage", "hall", "office", "garden", "cellar"]
SONGS = ["Blue River", "Summer Rain", "Old Road", "Morning Light", "Silver Moon", "Wild Wind", "Golden Days"]


@dataclass(frozen=True)
class Tool:
    """`ask` gives (question, arguments), `reply` gives (result, final sentence)."""

    name: str
    about: str
    params: tuple  # of (names, type, description)
    questions: tuple
    values: Callable
    reply: Callable

    def ask(self, rng: Random):
        values = self.values(rng)
        return rng.choice(self.questions).format(*values), values


def place(rng: Random) -> str:
    return rng.choice(world.CITIES)


def _weather(rng, a):
    t, c = rng.randint(0, 35), rng.choice(WEATHER)
    return {"temperature": t, "condition": c}, f"It is {t} degrees and {c} in {a[0]}."


def _time(rng, a):
    t = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"time": t}, f"It is {t} in {a[0]}."


CITY = (("city", "location"), "string", "Name of the city")
TOOLS = [
    Tool("get_weather", "Get the current weather.", (CITY,),
         ("What is the weather in {0}?", "How is the weather in {0}?", "Tell me the weather in {0}."), lambda r: (place(r),), _weather),
    Tool("get_time", "Get the current time.", (CITY,),
         ("What time is it in {0}?", "Tell me the time in {0}."), lambda r: (place(r),), _time),
    Tool("set_timer", "Start a timer.", ((("minutes",), "integer", "Length in minutes"),),
         ("Set a timer for {0} minutes.", "Start a timer of {0} minutes."), lambda r: (r.randint(2, 60),),
         lambda r, a: ({"status": "ok"}, f"The timer is set for {a[0]} minutes.")),
    Tool("turn_on_light", "Turn on the light in a room.", ((("room",), "string", "Name of the room"),),
         ("Turn on the light in the {0}.", "Switch on the {0} light."), lambda r: (r.choice(ROOMS),),
         lambda r, a: ({"status": "ok"}, f"The light in the {a[0]} is on.")),
    Tool("play_music", "Play a song.", ((("song",), "string", "Title of the song"),),
         ("Play {0}.", "Play the song {0}.", "I want to hear {0}."), lambda r: (r.choice(SONGS),),
         lambda r, a: ({"status": "ok"}, f"Now playing {a[0]}.")),
    Tool("multiply", "Multiply two numbers.", ((("a",), "number", "First number"), (("b",), "number", "Second number")),
         ("What is {0} times {1}?", "Multiply {0} by {1}."), lambda r: (r.randint(2, 12), r.randint(2, 12)),
         lambda r, a: ({"result": a[0] * a[1]}, f"{a[0]} times {a[1]} is {a[0] * a[1]}.")),
]


@dataclass(frozen=True)
class Offer:
    """A tool with concrete parameter names: what the system message lists."""

    tool: Tool
    params: tuple

    def schema(self) -> dict:
        properties = {p: {"type": t, "description": d} for p, (_, t, d) in zip(self.params, self.tool.params)}
        return {"type": "function", "function": {
            "name": self.tool.name, "description": self.tool.about,
            "parameters": {"type": "object", "properties": properties, "required": list(self.params)}}}


def offers(rng: Random, count: int) -> list:
    return [Offer(tool, tuple(rng.choice(names) for names, _, _ in tool.params)) for tool in rng.sample(TOOLS, count)]
