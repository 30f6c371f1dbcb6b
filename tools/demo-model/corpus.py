"""Conversations and stories for training, and unseen ones for the examination.

Every exchange has a key: the combination it is about (the two numbers and the wording, the object
and the wording, the name and the question). A hash of the key decides, once for all, whether it belongs to the
training text or is held out.
"""

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Callable, Optional

import chat
import limits
import stories
import tool_world
import world
from stories import with_article


def held_out(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] < 26  # a tenth


@dataclass
class Exchange:
    """Turns that belong together, and how to tell whether the model's part is right."""

    category: str
    key: str
    turns: list
    right: Optional[Callable] = None  # text -> bool; default: equal to the last turn
    plain: bool = True  # the user's words may be written carelessly
    about: Optional[str] = None  # what it tells or recalls: only once in a conversation
    earlier: tuple = ()  # turns it refers to, somewhere before it in the conversation


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def ask(category, key, question, answer, **more) -> Exchange:
    return Exchange(category, key, [user(question), said(answer)], **more)


def pick(rng, *wordings):
    i = rng.randrange(len(wordings))
    return i, wordings[i]


def cap(text: str) -> str:
    return text[0].upper() + text[1:]


# Facts ---------------------------------------------------------------------------------------


def colour(rng):
    if rng.random() < 0.3:
        thing = rng.choice(list(world.MASS_COLOURS))
        right, np = world.MASS_COLOURS[thing], thing
    else:
        thing = rng.choice(list(world.COLOURS))
        right, np = world.COLOURS[thing], with_article(thing)
    i, q = pick(rng, "What colour is {}?", "What color is {}?", "Tell me the colour of {}.", "What is the color of {}?")
    return ask("facts", f"colour|{thing}|{i}", q.format(np), f"{cap(np)} is {right}.")


def size(rng):
    i, j = rng.sample(range(len(world.SIZES)), 2)
    x, y = with_article(world.SIZES[i]), with_article(world.SIZES[j])
    word = rng.choice(["bigger", "smaller"])
    best, other = (x, y) if (i > j) == (word == "bigger") else (y, x)
    return ask("sizes", f"size|{x}|{y}|{word}", f"Which is {word}, {x} or {y}?", f"{cap(best)} is {word} than {other}.")


def table_fact(rng):
    table = rng.choice(["sound", "habitat", "baby", "legs", "food", "capital", "capital", "opposite", "opposite"])
    if table == "sound":
        x = rng.choice(list(world.SOUNDS))
        i, q = pick(rng, "What sound does {} make?", "Which sound does {} make?", "What does {} do?")
        q, answer = q.format(with_article(x)), f"{cap(with_article(x))} {world.SOUNDS[x]}."
    elif table == "habitat":
        x = rng.choice(list(world.HABITATS))
        i, q = pick(rng, "Where does {} live?", "Where can I find {}?", "Tell me where {} lives.")
        q, answer = q.format(with_article(x)), f"{cap(with_article(x))} lives {world.HABITATS[x]}."
    elif table == "baby":
        x = rng.choice(list(world.BABIES))
        i, q = pick(rng, "What is a baby {} called?", "What do you call a young {}?", "What is a young {} called?")
        q, answer = q.format(x), f"A young {x} is called {with_article(world.BABIES[x])}."
    elif table == "legs":
        x = rng.choice(list(world.LEGS))
        i, q = pick(rng, "How many legs does {} have?", "How many legs has {}?", "Tell me how many legs {} has.")
        q, answer = q.format(with_article(x)), f"{cap(with_article(x))} has {world.LEGS[x]} legs."
    elif table == "food":
        x = rng.choice(list(world.FOODS))
        i, q = pick(rng, "What does {} eat?", "What does {} like to eat?", "What is the food of {}?")
        q, answer = q.format(with_article(x)), f"{cap(with_article(x))} eats {world.FOODS[x]}."
    elif table == "capital":
        x = rng.choice(list(world.CAPITALS))
        i, q = pick(rng, "What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.", "What's the capital of {}?")
        q, answer = q.format(x), f"The capital of {x} is {world.CAPITALS[x]}."
    else:
        pair = rng.choice(world.OPPOSITES)
        x, y = pair if rng.random() < 0.5 else pair[::-1]
        i, q = pick(rng, "What is the opposite of {}?", "Tell me the opposite of {}.", "Which word is the opposite of {}?")
        q, answer = q.format(x), f"The opposite of {x} is {y}."
    return ask("facts", f"{table}|{x}|{i}", q, answer)


def day(rng):
    x, step = rng.choice(world.DAYS), rng.choice([1, -1])
    y = world.DAYS[(world.DAYS.index(x) + step) % 7]
    word = "after" if step > 0 else "before"
    i, q = pick(rng, "What day comes {w} {x}?", "Which day is {w} {x}?", "What comes {w} {x}?", "Tell me the day {w} {x}.")
    return ask("facts", f"day|{word}|{x}|{i}", q.format(w=word, x=x), f"{y} comes {word} {x}.")


# Numbers -------------------------------------------------------------------------------------


def add(rng):
    a = rng.randint(0, 20)
    b = rng.randint(0, 20 - a)
    i, q = pick(rng, "What is {a} plus {b}?", "What is {a} + {b}?", "How much is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b}", "{a}+{b}")
    return ask("adding", f"add|{a}|{b}|{i}", q.format(a=a, b=b), f"{a} plus {b} is {a + b}.")


def subtract(rng):
    b, a = sorted((rng.randint(0, 20), rng.randint(0, 20)))
    i, q = pick(rng, "What is {a} minus {b}?", "What is {a} - {b}?", "How much is {a} minus {b}?", "Take {b} away from {a}.", "{a} - {b}", "{a}-{b}")
    return ask("subtracting", f"sub|{a}|{b}|{i}", q.format(a=a, b=b), f"{a} minus {b} is {a - b}.")


def count(rng):
    a = 1 if rng.random() < 0.35 else rng.randint(0, 27)
    b = rng.randint(a + 2, min(a + (19 if a == 1 else 9), 30))
    numbers, down = range(a, b + 1), a != 1 and rng.random() < 0.3
    if down:
        numbers = reversed(numbers)
        q = rng.choice([f"Count down from {b} to {a}.", f"Count from {b} down to {a}."])
    elif a == 1:
        q = rng.choice([f"Count to {b}.", f"Can you count to {b}?", f"Count from {a} to {b}."])
    else:
        q = rng.choice([f"Count from {a} to {b}.", f"Can you count from {a} to {b}?"])
    return ask("counting", f"count|{q}", q, ", ".join(map(str, numbers)) + ".")


def neighbour(rng):
    x = rng.randint(1, 30)
    y, word = (x + 1, "after") if rng.random() < 0.5 else (x - 1, "before")
    i, q = pick(rng, "What number comes {w} {x}?", "Which number is {w} {x}?", "What comes {w} {x}?")
    return ask("counting", f"next|{word}|{x}|{i}", q.format(w=word, x=x), f"{y} comes {word} {x}.")


# Talk ----------------------------------------------------------------------------------------

WHO = "I am the Ferrum demo model, a very small language model."
CAN = "I can tell short stories, answer simple questions, count, add small numbers and call tools."
CANNOT = "I cannot write code, translate or look things up, and I know only a very small world."
TALK = [
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."], [WHO]),
    (["What can you do?", "How can you help me?", "What do you know?", "Help", "What are you good at?", "Can you help me?"], [CAN]),
    (["What can you not do?", "What can't you do?", "What are your limits?"], [CANNOT]),
    (["I am sad.", "I feel sad.", "I am bored.", "I am tired.", "I feel lonely."], ["I am sorry to hear that. I can tell you a story."]),
    (["I like your story.", "That was a nice story.", "What a nice story!", "I love it.", "You are funny."], ["I am glad that you like it!"]),
    (["Are you a human?", "Are you real?"], ["No, I am a small language model."]),
    (["Who made you?", "Where do you come from?"], ["I was trained from scratch by a script in the Ferrum repository."]),
    (["What is Ferrum?", "Tell me about Ferrum."], ["Ferrum is an engine written in Rust that runs language models."]),
    (["How big are you?", "How many parameters do you have?"], ["I am very small: I have about three million parameters."]),
    (["How are you?", "How are you today?"], ["I am fine, thank you. How can I help you?"]),
    (["Tell me a joke.", "Do you know a joke?"], ["Why is six afraid of seven? Because seven eight nine!", "What has hands but cannot clap? A clock!"]),
]
GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there"]
THANKS = (["Thank you", "Thanks", "Thank you very much", "Thanks a lot"], ["You are welcome!"])
BYE = (["Goodbye", "Bye", "See you later", "Good night"], ["Goodbye! See you soon."])
HELLO = (GREETINGS, ["Hello! How can I help you?"])
YES = (["OK", "Okay", "Nice", "Great", "Cool", "Good", "Wow", "Well done", "Good job", "I see", "Interesting", "Yes", "No"], ["All right. What shall I do next?"])


def talk(rng):
    """A short word on its own, or a question with or without a greeting before it. Only those with one are ever held out."""
    key = ""
    if rng.random() < 0.3:
        words, answers = rng.choice([HELLO, HELLO, THANKS, BYE, YES])
        question = rng.choice(words) + rng.choice(["", ".", "!"])
    else:
        questions, answers = rng.choice(TALK)
        question = rng.choice(questions)
        if rng.random() < 0.4:
            question = rng.choice(GREETINGS) + rng.choice([", " + question[0].lower(), "! " + question[0]]) + question[1:]
            key = f"talk|{question}"
    return Exchange("talk", key, [user(question), said(rng.choice(answers))], right=lambda text: text in answers)


def unknown(rng):
    question, answer = limits.request(rng)
    return ask("not knowing", f"unknown|{question}", question, answer, right=lambda text: text in limits.HONEST)


def memory(rng):
    """Something told and, later in the conversation, asked for; or asked for without having been told."""
    name = rng.choice(world.NAMES)
    if rng.random() < 0.6:
        about, tell = "name", rng.choice([f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}."])
        reply, missing = f"Nice to meet you, {name}!", "You have not told me your name."
        question, answer = rng.choice(["What is my name?", "Who am I?", "Do you know my name?"]), f"Your name is {name}."
        key = f"name|{name}|{question}"
    else:
        about = rng.choice("dog cat horse bird rabbit".split())
        tell, reply = rng.choice([f"I have a {about} named {name}.", f"My {about} is called {name}."]), f"That is a nice name for a {about}."
        question, answer = rng.choice([f"What is the name of my {about}?", f"What is my {about} called?"]), f"Your {about} is called {name}."
        key, missing = f"pet|{about}|{name}", f"You have not told me the name of your {about}."
    kind = rng.random()
    if kind < 0.22:
        return ask("remembering", f"untold|{question}|{name}", question, missing, about=about)
    if kind < 0.28:
        return ask("remembering", f"told|{key}", tell, reply, about=about)
    # A conversation whose oldest turns were dropped may begin with the question, asked before.
    earlier = (user(tell), said(reply)) if kind < 0.92 else (user(question), {**said(answer), "given": True})
    return ask("remembering", key, question, answer, about=about, earlier=earlier)


def filler(rng):
    return _fresh(rng, rng.choice([colour, table_fact, day, add, talk]))


# Stories -------------------------------------------------------------------------------------

TELL = ["Tell me a story about {}.", "Write a story about {}.", "Can you tell me a story about {}?", "A story about {}, please."]


def story(rng):
    tell = rng.choice(TELL)
    kind = rng.random()
    # Any word can be a hero: what the request names is copied.
    hero = rng.choice(stories.HEROES) if rng.random() < 0.75 else rng.choice([*limits.ANIMALS, *limits.THINGS, stories.nonsense(rng)])
    if kind < 0.6:
        wanted, topic = dict(hero=hero), with_article(hero)
    elif kind < 0.85:
        name = rng.choice(stories.HE_NAMES + stories.SHE_NAMES)
        wanted, topic = dict(hero=hero, name=name), f"{with_article(hero)} named {name}"
    else:
        wanted, topic = {}, ""
        tell = rng.choice(["Tell me a story.", "Tell me another story.", "Write a story.", "Can you tell me a story?", "One more story, please.", "Tell me a short story.",
                           "Another one, please.", "Tell me one more.", "Please tell me a story.", "Write a short story.", "Another story"])
    key = f"story|{tell}|{topic}"
    return Exchange("stories", key, [user(tell.format(topic)), said(stories.write(rng, **wanted))], right=lambda text: stories.problem_with(text, **wanted) is None)


# Tools ---------------------------------------------------------------------------------------


def tool_use(rng, offered):
    """A question for one of the offered tools: question, call, result, final sentence."""
    offer = rng.choice(offered)
    question, values = offer.tool.ask(rng)
    arguments = dict(zip(offer.params, values))
    result, final = offer.tool.reply(rng, values)
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": offer.tool.name, "arguments": arguments}}]}
    turns = [user(question), call, {"role": "tool", "content": chat.dumps(result, compact=rng.random() < 0.3)}, said(final)]
    return Exchange("tools", f"tool|{offer.tool.name}|{question}", turns, plain=False)


def no_tool(rng, offered):
    """A request that none of the offered tools serves."""
    missing = rng.choice([t for t in tool_world.TOOLS if t not in [o.tool for o in offered]])
    question, values = missing.ask(rng)
    return Exchange("tools: none fits", f"none|{question}", [user(question), said("I am sorry, I have no tool for that.")], plain=False)


# Whole documents -----------------------------------------------------------------------------

SYSTEMS = ["You are a helpful assistant.", "You are a friendly assistant.", "You are the Ferrum demo model.", "You are a kind teacher."]
MIX = [(story, 12), (add, 14), (subtract, 14), (count, 11), (neighbour, 5), (colour, 5), (size, 9), (table_fact, 9), (day, 3), (talk, 9),
       (unknown, 20), (memory, 12)]
_makers, _weights = zip(*MIX)


def careless(rng, text):
    """The same words as people type them: without the full stop, without capitals."""
    if rng.random() < 0.2:
        text = text.rstrip(".?!")
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text


def _fresh(rng, make, *args, wanted_held_out=False):
    for _ in range(3000):
        e = make(rng, *args)
        if held_out(e.key) == wanted_held_out:
            return e
    raise RuntimeError(f"no {'held-out' if wanted_held_out else 'training'} exchange from {make}")


def _any_exchange(rng):
    return _fresh(rng, rng.choices(_makers, _weights)[0])


@dataclass
class Document:
    """Pieces of text, each with whether the model says it."""

    pieces: list


def _messages(rng, exchanges, system):
    """One conversation. What an exchange refers to goes to some place before it."""
    groups = []
    for e in exchanges:
        if e.earlier:
            groups.insert(rng.randint(0, len(groups)), (e.earlier, e.plain))
        groups.append((e.turns, e.plain))
    out = [{"role": "system", "content": system}] if system else []
    for turns, plain in groups:
        for m in turns:
            out.append({**m, "content": careless(rng, m["content"])} if m["role"] == "user" and plain else m)
    return out


def _conversation(rng, count, make, last=()):
    """`count` exchanges and the `last` ones, in which nothing is told twice."""
    out, about = [], {e.about for e in last}
    while len(out) < count:
        e = make(rng)
        if not e.about or e.about not in about:
            about.add(e.about)
            out.append(e)
    return [*out, *last]


def _length(rng) -> int:
    """How many exchanges a conversation has: many are short, some fill the context."""
    kind = rng.random()
    return 1 if kind < 0.2 else rng.randint(2, 4) if kind < 0.45 else rng.randint(4, 8) if kind < 0.85 else rng.randint(8, 18)


def training_document(rng) -> Document:
    kind = rng.random()
    if kind < 0.05:
        return Document([(stories.write(rng) + chat.END, True)])
    system = rng.choice(SYSTEMS) if rng.random() < 0.15 else None
    if kind < 0.27:
        offered = tool_world.offers(rng, rng.choice([1, 1, 2, 2, 3]))
        exchanges = []
        for _ in range(rng.choice([1, 1, 2])):
            make = rng.choices([tool_use, no_tool, None], [60, 30, 10])[0]
            exchanges.append(_fresh(rng, make, offered) if make else filler(rng))
        return Document(chat.render(_messages(rng, exchanges, system), [o.schema() for o in offered]))
    exchanges = _conversation(rng, _length(rng), _any_exchange)
    return Document(chat.render(_messages(rng, exchanges, system)))


# The examination -----------------------------------------------------------------------------


@dataclass
class Case:
    """One unseen question: the conversation up to it, and the test of the answer.

    Without messages, the case is bare text to go on with: `expected`, which the test wants in front.
    """

    category: str
    messages: Optional[list]
    tools: Optional[list]
    expected: str
    right: Callable


def _case(category, messages, tools, right=None):
    last = messages[-1]
    expected = last["content"] or chat.call_text(**last["tool_calls"][0]["function"])
    return Case(category, messages[:-1], tools, expected, right or (lambda text: text == expected))


def _held_out_tool_use(rng):
    while True:
        offered = tool_world.offers(rng, rng.choice([1, 2, 3]))
        e = tool_use(rng, offered)
        if held_out(e.key):
            return e, [o.schema() for o in offered]


def examination(seed: int, per_category: int) -> list:
    """`per_category` held-out cases of each category, half of them after earlier turns."""
    rng = Random(f"examination {seed}")
    cases = []
    by_category = {}
    for make in _makers:
        for _ in range(400):
            e = _fresh(rng, make, wanted_held_out=True)
            by_category.setdefault(e.category, []).append(e)
    for category, found in by_category.items():
        for e in rng.sample(found, min(per_category, len(found))):
            exchanges = _conversation(rng, rng.choice([0, 0, 1, 2]), _any_exchange, [e])
            cases.append(_case(category, _messages(rng, exchanges, None), None, e.right))
    for _ in range(per_category):
        e, schemas = _held_out_tool_use(rng)
        messages = _messages(rng, [e], None)
        cases.append(_case("tools: call", messages[:2], schemas))
        cases.append(_case("tools: answer from result", messages, schemas))
        offered = tool_world.offers(rng, rng.choice([1, 2, 3]))
        e = _fresh(rng, no_tool, offered, wanted_held_out=True)
        cases.append(_case(e.category, _messages(rng, [e], None), [o.schema() for o in offered]))
        words = stories.write(rng).split(" ")
        opening = " ".join(words[: rng.randint(4, 16)])
        cases.append(Case("stories: going on", None, None, opening, lambda text: stories.problem_with(text) is None))
    return cases


TURN_KINDS = [story, [add, subtract, count, neighbour], [colour, table_fact, day, size], [unknown, talk]]


def long_talks(seed: int, count: int) -> list:
    """Conversations of six questions, each [Exchange]: a name is told in the first and asked for in the last.

    Between them is one of each of `TURN_KINDS`, in any order; in every second conversation two stories.
    """
    rng = Random(f"long talks {seed}")
    out = []
    for i in range(count):
        kinds = [k if callable(k) else rng.choice(k) for k in TURN_KINDS]
        if i % 2:
            kinds[rng.randrange(1, 4)] = story
        rng.shuffle(kinds)
        name = None
        while not (name and name.about == "name" and name.earlier and name.earlier[1]["content"].startswith("Nice")):
            name = _fresh(rng, memory, wanted_held_out=True)
        tell = Exchange("remembering", "", list(name.earlier), about="name")
        recall = Exchange("remembering", name.key, name.turns, about="name")
        out.append([tell, *(_fresh(rng, k, wanted_held_out=True) for k in kinds), recall])
    return out


def held_out_documents(seed: int, count: int) -> list:
    """Conversations made of held-out exchanges only, for the perplexity."""
    rng = Random(f"perplexity {seed}")
    docs = []
    for _ in range(count):
        if rng.random() < 0.15:
            e, tools = _held_out_tool_use(rng)
        else:
            e, tools = _fresh(rng, rng.choices(_makers, _weights)[0], wanted_held_out=True), None
        docs.append(Document(chat.render(_messages(rng, [e], None), tools)))
    return docs
