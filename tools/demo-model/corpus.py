"""Conversations and stories for training, and unseen ones for the examination.

Every exchange has a key: the combination it is about (the two summands, the two animals, the
object and the wording). A hash of the key decides, once for all, whether it belongs to the
training text or is held out.
"""

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Callable, Optional

import chat
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
    brief: Optional[str] = None  # the last answer in one word
    plain: bool = True  # the user's words may be written carelessly


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
    answer = f"{cap(np)} is {right}."
    if rng.random() < 0.35:
        guess = right if rng.random() < 0.4 else rng.choice(world.COLOUR_NAMES)
        yes = "Yes" if guess == right else "No"
        return ask("facts", f"colour?|{thing}|{guess}", f"Is {np} {guess}?", f"{yes}, {answer[0].lower()}{answer[1:]}", brief=yes + ".")
    i, q = pick(rng, "What colour is {}?", "What color is {}?", "Which colour is {}?", "Tell me the colour of {}.", "What is the color of {}?")
    return ask("facts", f"colour|{thing}|{i}", q.format(np), answer, brief=cap(right) + ".")


def size(rng):
    a, b = rng.sample(world.SIZES, 2)
    key = "size|" + "|".join(sorted((a, b)))
    bigger = world.SIZES.index(a) > world.SIZES.index(b)
    x, y = with_article(a), with_article(b)
    kind = rng.randrange(4)
    if kind == 0:
        return ask("sizes", key, f"Which is bigger, {x} or {y}?", f"{cap(x if bigger else y)} is bigger than {y if bigger else x}.", brief=cap(a if bigger else b) + ".")
    if kind == 1:
        return ask("sizes", key, f"Which is smaller, {x} or {y}?", f"{cap(y if bigger else x)} is smaller than {x if bigger else y}.", brief=cap(b if bigger else a) + ".")
    word = "bigger" if kind == 2 else "smaller"
    truth = "bigger" if bigger else "smaller"
    yes = "Yes" if word == truth else "No"
    return ask("sizes", key, f"Is {x} {word} than {y}?", f"{yes}, {x} is {truth} than {y}.", brief=yes + ".")


def table_fact(rng):
    table = rng.choice(["sound", "habitat", "baby", "legs", "food", "capital", "kind", "plural", "opposite", "opposite"])
    brief = None
    if table == "sound":
        x = rng.choice(list(world.SOUNDS))
        i, q = pick(rng, "What sound does {} make?", "What does {} do when it makes a noise?", "Which sound does {} make?", "How does {} sound?")
        q, answer = q.format(with_article(x)), f"{cap(with_article(x))} {world.SOUNDS[x]}."
    elif table == "habitat":
        x = rng.choice(list(world.HABITATS))
        i, q = pick(rng, "Where does {} live?", "Where can I find {}?", "What is the home of {}?", "Tell me where {} lives.")
        q, answer = q.format(with_article(x)), f"{cap(with_article(x))} lives {world.HABITATS[x]}."
    elif table == "baby":
        x = rng.choice(list(world.BABIES))
        baby = world.BABIES[x]
        i, q = pick(rng, "What is a baby {} called?", "What do you call a young {}?", "What is the name for a young {}?", "How is a baby {} called?")
        q, answer, brief = q.format(x), f"A young {x} is called {with_article(baby)}.", cap(baby) + "."
    elif table == "legs":
        x = rng.choice(list(world.LEGS))
        i, q = pick(rng, "How many legs does {} have?", "How many legs has {}?", "Tell me how many legs {} has.")
        q, answer, brief = q.format(with_article(x)), f"{cap(with_article(x))} has {world.LEGS[x]} legs.", cap(world.LEGS[x]) + "."
    elif table == "food":
        x = rng.choice(list(world.FOODS))
        i, q = pick(rng, "What does {} eat?", "What does {} like to eat?", "What is the food of {}?", "What should I feed to {}?")
        q, answer, brief = q.format(with_article(x)), f"{cap(with_article(x))} eats {world.FOODS[x]}.", cap(world.FOODS[x]) + "."
    elif table == "capital":
        x = rng.choice(list(world.CAPITALS))
        city = world.CAPITALS[x]
        i, q = pick(rng, "What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.", "Capital of {}?", "What's the capital of {}?")
        q, answer, brief = q.format(x), f"The capital of {x} is {city}.", city + "."
    elif table == "kind":
        kind = rng.choice(list(world.KINDS))
        x = rng.choice(world.KINDS[kind])
        np = x if kind == "colour" else with_article(x)
        guess = kind if rng.random() < 0.4 else rng.choice(list(world.KINDS))
        i = guess
        if rng.random() < 0.4:
            i, q = "what", f"What is {np}?"
            answer, brief = f"{cap(np)} is {with_article(kind)}.", cap(kind) + "."
        else:
            yes = "Yes" if guess == kind else "No"
            q, answer, brief = f"Is {np} {with_article(guess)}?", f"{yes}, {np} is {with_article(kind)}.", yes + "."
    elif table == "plural":
        x = rng.choice(list(world.PLURALS))
        y = world.PLURALS[x]
        i, q = pick(rng, "What is the plural of {}?", "Tell me the plural of {}.", "One {}, two what?", "What do you call more than one {}?")
        q, answer, brief = q.format(x), f"The plural of {x} is {y}.", cap(y) + "."
    else:
        pair = rng.choice(world.OPPOSITES)
        x, y = pair if rng.random() < 0.5 else pair[::-1]
        i, q = pick(rng, "What is the opposite of {}?", "Tell me the opposite of {}.", "What is the contrary of {}?", "Which word is the opposite of {}?", "{} is the opposite of what?")
        q, answer, brief = cap(q.format(x)), f"The opposite of {x} is {y}.", cap(y) + "."
    return ask("facts", f"{table}|{x}|{i}", q, answer, brief=brief)


def calendar(rng):
    names, unit = (world.DAYS, "day") if rng.random() < 0.6 else (world.MONTHS, "month")
    x = rng.choice(names)
    step = rng.choice([1, -1])
    y = names[(names.index(x) + step) % len(names)]
    word = "after" if step > 0 else "before"
    i, q = pick(rng, "What {u} comes {w} {x}?", "Which {u} is {w} {x}?", "What comes {w} {x}?", "What is the {u} {w} {x}?",
                "Tell me the {u} {w} {x}.", "today", "today2")
    if i >= 5:
        if unit == "month":
            i, q = 0, "What {u} comes {w} {x}?"
        elif step > 0:
            q = ["Today is {x}. What day is tomorrow?", "If today is {x}, what is tomorrow?"][i - 5]
            return ask("calendar", f"tomorrow|{x}|{i}", q.format(x=x), f"If today is {x}, tomorrow is {y}.", brief=y + ".")
        else:
            q = ["Today is {x}. What day was yesterday?", "If today is {x}, what was yesterday?"][i - 5]
            return ask("calendar", f"yesterday|{x}|{i}", q.format(x=x), f"If today is {x}, yesterday was {y}.", brief=y + ".")
    return ask("calendar", f"calendar|{word}|{x}|{i}", q.format(u=unit, w=word, x=x), f"{y} comes {word} {x}.", brief=y + ".")


# Numbers -------------------------------------------------------------------------------------


def small_pair(rng):
    top = 20 if rng.random() < 0.5 else 99
    return rng.randint(0, top), rng.randint(0, top)


def number_category(name, *numbers):
    return f"{name} (up to 20)" if max(numbers) <= 20 else f"{name} (up to 99)"


def add(rng):
    a, b = small_pair(rng)
    key, c = f"add|{a}|{b}", a + b
    category = number_category("adding", a, b)
    kind = rng.random()
    if kind < 0.12 and a > 1 and b > 1:
        gender = rng.random() < 0.5
        name = rng.choice(stories.HE_NAMES if gender else stories.SHE_NAMES)
        he = "he" if gender else "she"
        thing = rng.choice("apples nuts books balls coins eggs cookies pears".split())
        _, q = pick(rng, "{n} has {a} {t} and gets {b} more. How many {t} does {h} have now?", "{n} has {a} {t} and finds {b} more. How many {t} does {h} have?")
        return ask(category, key, q.format(n=name, a=a, b=b, t=thing, h=he), f"{a} plus {b} is {c}, so {name} has {c} {thing}.")
    if kind < 0.4:
        _, q = pick(rng, "What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "Calculate {a} + {b}.", "{a}+{b}", "What's {a}+{b}?", "{a}+{b}=")
        return ask(category, key, q.format(a=a, b=b), f"{a} + {b} = {c}.", brief=f"{c}.")
    if kind < 0.5 and c <= 20:
        w = world.NUMBER_WORDS
        return ask(category, key, f"What is {w[a]} plus {w[b]}?", f"{cap(w[a])} plus {w[b]} is {w[c]}.", brief=cap(w[c]) + ".")
    _, q = pick(rng, "What is {a} plus {b}?", "How much is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}?", "Can you add {a} and {b}?", "What's {a} plus {b}?")
    return ask(category, key, q.format(a=a, b=b), f"{a} plus {b} is {c}.", brief=f"{c}.")


def subtract(rng):
    a, b = sorted(small_pair(rng), reverse=True)
    key, c = f"sub|{a}|{b}", a - b
    category = number_category("subtracting", a, b)
    if rng.random() < 0.4:
        _, q = pick(rng, "What is {a} - {b}?", "{a} - {b}", "{a} - {b} = ?", "Calculate {a} - {b}.", "{a}-{b}")
        return ask(category, key, q.format(a=a, b=b), f"{a} - {b} = {c}.", brief=f"{c}.")
    _, q = pick(rng, "What is {a} minus {b}?", "How much is {a} minus {b}?", "Subtract {b} from {a}.", "Take {b} away from {a}.", "{a} minus {b}?")
    return ask(category, key, q.format(a=a, b=b), f"{a} minus {b} is {c}.", brief=f"{c}.")


def multiply(rng):
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    i, q = pick(rng, "What is {a} times {b}?", "How much is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?", "{a} x {b}", "{a} times {b}?")
    return ask("times table", f"mul|{a}|{b}|{i}", q.format(a=a, b=b), f"{a} times {b} is {a * b}.", brief=f"{a * b}.")


def count(rng):
    step = 1 if rng.random() < 0.8 else rng.choice([2, 5, 10])
    a = rng.randint(0, 100) if rng.random() < 0.6 else rng.randint(0, 10)
    if step > 1:
        a = a // step * step
    if rng.random() < 0.2:
        a = step
    b = a + step * rng.randint(2, 12)
    up = rng.random() < 0.7 or step > 1
    numbers = list(range(a, b + 1, step))
    key = f"count|{a}|{b}|{step}|{up}"
    if step > 1:
        q = rng.choice([f"Count from {a} to {b} in steps of {step}.", f"Count by {step} from {a} to {b}."])
    elif not up:
        numbers.reverse()
        q = rng.choice([f"Count down from {b} to {a}.", f"Count backwards from {b} to {a}.", f"Count from {b} down to {a}."])
    elif a == 1 and rng.random() < 0.7:
        q = rng.choice([f"Count to {b}.", f"Can you count to {b}?", f"Count up to {b}."])
    else:
        q = rng.choice([f"Count from {a} to {b}.", f"Can you count from {a} to {b}?", f"Please count from {a} to {b}.", f"List the numbers from {a} to {b}."])
    return ask("counting", key, q, ", ".join(map(str, numbers)) + ".")


def number_order(rng):
    if rng.random() < 0.5:
        x = rng.randint(1, 120)
        y, word = (x + 1, "after") if rng.random() < 0.5 else (x - 1, "before")
        i, q = pick(rng, "What number comes {w} {x}?", "Which number is {w} {x}?", "What comes {w} {x}?")
        return ask("counting", f"next|{word}|{x}", q.format(w=word, x=x), f"{y} comes {word} {x}.", brief=f"{y}.")
    a, b = rng.sample(range(100), 2)
    word = rng.choice(["bigger", "smaller"])
    x, y = (max(a, b), min(a, b)) if word == "bigger" else (min(a, b), max(a, b))
    q = rng.choice([f"Which is {word}, {a} or {b}?", f"Which number is {word}, {a} or {b}?"])
    return ask("counting", f"order|{min(a, b)}|{max(a, b)}", q, f"{x} is {word} than {y}.", brief=f"{x}.")


# Talk ----------------------------------------------------------------------------------------

WHO = "I am the Ferrum demo model, a very small language model that runs on the Ferrum engine."
CAN = "I can tell short stories, write little poems, answer simple questions, count, add small numbers and call tools."
THINGS_UNKNOWN = """Linux,Python,a car,a radio,quantum physics,the stock market,football,tennis,taxes,electricity,philosophy,chemistry,
the internet,a bank,medicine,politics,a rocket,music,JavaScript,climate change,a computer,relativity,money,love""".replace("\n", "").split(",")
UNKNOWN = "I do not know that. I am only a small demo model. Ask me for a story, a simple fact or a sum."
TALK = [
    ("who", ["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "What is your name?", "What's your name?", "Who am I talking to?", "Are you a language model?", "Are you an AI?", "Who are you and what do you do?"], [WHO]),
    ("can", ["What can you do?", "How can you help me?", "What can I ask you?", "Help", "What are you good at?", "What do you know?", "Can you help me?", "What should I ask you?"], [CAN]),
    ("human", ["Are you a human?", "Are you human?", "Are you a person?", "Are you real?", "Are you a robot?"], ["No, I am a small language model."]),
    ("maker", ["Who made you?", "Who created you?", "Where do you come from?", "Who trained you?", "How were you made?", "How were you trained?"], ["I was trained from scratch by a small script in the Ferrum repository."]),
    ("ferrum", ["What is Ferrum?", "Tell me about Ferrum.", "What does Ferrum do?", "What is the Ferrum engine?", "What does Ferrum mean?"], ["Ferrum is an engine written in Rust that runs language models."]),
    ("size", ["How big are you?", "How many parameters do you have?", "How large are you?", "Are you a big model?"], ["I am very small: I have about three million parameters."]),
    ("hello", ["Hello!", "Hi!", "Hello", "Hi", "Hey", "Hi there!", "Hello there.", "Good morning!", "Good evening!", "Good day.", "Hey there!", "Greetings!"], ["Hello! How can I help you?", "Hello! What would you like to know?", "Hi! Ask me for a story or a sum."]),
    ("how", ["How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?", "What's up?", "How do you feel?"], ["I am fine, thank you. How can I help you?"]),
    ("thanks", ["Thank you.", "Thanks!", "Thank you very much!", "Thanks a lot.", "That was nice, thank you.", "Great, thanks!", "Many thanks."], ["You are welcome!"]),
    ("bye", ["Goodbye!", "Bye!", "See you later.", "Good night!", "See you soon.", "Bye bye."], ["Goodbye! See you soon."]),
    ("praise", ["Well done!", "Very good!", "You are clever.", "That is right.", "Nice!", "I like you.", "Good job!", "Cool!"], ["Thank you! What would you like to know next?"]),
    ("joke", ["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Another joke, please.", "Say something funny.", "Can you tell a joke?", "I want to hear a joke."], world.JOKES),
    ("meaning", ["What is the meaning of life?"], ["Forty-two, some say. I would rather tell you a story."]),
]


def talk(rng):
    name, questions, answers = rng.choice(TALK)
    question = rng.choice(questions)
    return Exchange("talk", f"{name}|{question}", [user(question), said(rng.choice(answers))], right=lambda text: text in answers)


def poem(rng):
    animals = stories.HEROES + ["star", "flower", "cloud", "river", "tree", "house", "train"]
    x = stories.nonsense(rng) if rng.random() < 0.15 else rng.choice(animals)
    i, q = pick(rng, "Write a poem about {}.", "Write me a little poem about {}.", "Can you write a poem about {}?", "A poem about {}, please.", "Make a rhyme about {}.")
    poems = ["\n".join(lines).format(x=x) for lines in world.POEM_ENDS]
    return Exchange("poems", f"poem|{x}|{i}", [user(q.format(with_article(x))), said(rng.choice(poems))], right=lambda t: t in poems)


def unknown(rng):
    noun = rng.choice("telephone computer bridge war king queen president actor singer team movie song company engine law theory language planet painting novel game doctor price recipe".split())
    thing = rng.choice(THINGS_UNKNOWN)
    odd = stories.nonsense(rng)
    _, q = pick(rng, f"Who invented the {noun}?", f"Who wrote the {noun} of {odd}?", f"How do I install {thing}?", f"Explain {thing} to me.",
                f"What is the history of {odd}?", f"Who was the first {noun} of {odd}?", f"How does {odd} work?", f"What is {odd}?", f"Who is {cap(odd)}?",
                f"Why is the {noun} so {rng.choice(['old', 'famous', 'good', 'bad', 'big'])}?", f"When was the {noun} built?", f"What do you think about {thing}?",
                f"What is the capital of {cap(odd)}?", f"What colour is {with_article(odd)}?", f"What sound does {with_article(odd)} make?",
                f"Where does {with_article(odd)} live?", f"Write a program in {thing}.", f"Give me a recipe for {odd} soup.", f"How old is the {noun}?",
                f"What is the best {noun}?", f"Who won the {noun} in {rng.randint(1900, 2030)}?", f"What happened in {rng.randint(1000, 2030)}?",
                f"Translate {odd} for me.", f"Summarize the {noun} of {odd}.", f"Tell me about {odd}.", f"What is the opposite of {odd}?")
    return ask("not knowing", f"unknown|{q}", q, UNKNOWN)


def memory(rng):
    kind = rng.randrange(4)
    odd = cap(stories.nonsense(rng))
    if kind == 0:
        name = odd if rng.random() < 0.6 else rng.choice(stories.HE_NAMES + stories.SHE_NAMES)
        first = rng.choice([f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}!", f"Call me {name}."])
        turns = [user(first), said(f"Nice to meet you, {name}!")]
        question, answer = rng.choice(["What is my name?", "Who am I?", "Do you know my name?", "Do you remember my name?", "What's my name?"]), f"Your name is {name}."
        key = f"name|{name}|{question}"
    elif kind == 1:
        animal = rng.choice("dog cat horse bird rabbit mouse fish pony parrot turtle".split())
        turns = [user(rng.choice([f"I have a {animal} named {odd}.", f"My {animal} is called {odd}."])), said(f"{odd} is a nice name for a {animal}.")]
        question, answer = rng.choice([f"What is the name of my {animal}?", f"What is my {animal} called?", f"Do you remember the name of my {animal}?"]), f"Your {animal} is called {odd}."
        key = f"pet|{animal}|{odd}"
    elif kind == 2:
        thing, colour_ = rng.choice("car house ball hat bicycle coat bag boat kite shirt cup door".split()), rng.choice(world.COLOUR_NAMES)
        turns = [user(rng.choice([f"My {thing} is {colour_}.", f"I have {with_article(colour_)} {thing}."])), said(f"{cap(with_article(colour_))} {thing} is nice.")]
        question, answer = rng.choice([f"What colour is my {thing}?", f"What color is my {thing}?", f"Which colour does my {thing} have?"]), f"Your {thing} is {colour_}."
        key = f"mine|{thing}|{colour_}"
    else:
        food = rng.choice("apples bananas cheese cookies soup bread honey carrots nuts pears cherries pizza rice fish".split())
        turns = [user(rng.choice([f"I like {food}.", f"I love {food}.", f"My favorite food is {food}."])), said(f"{cap(food)}! That is a good choice.")]
        question, answer = rng.choice(["What is my favorite food?", "What do I like to eat?", "What food do I like?"]), f"You like {food}."
        key = f"likes|{food}|{question}"
    middle = []
    if rng.random() < 0.4:
        middle = filler(rng).turns
    return Exchange("remembering", key, turns + middle + [user(question), said(answer)])


def filler(rng):
    while True:
        e = rng.choice([colour, size, table_fact, calendar, add, talk])(rng)
        if not held_out(e.key):
            return e


# Stories -------------------------------------------------------------------------------------

TELL = ["Tell me a story about {}.", "Write a story about {}.", "Tell me a short story about {}.", "Can you tell me a story about {}?", "I want to hear a story about {}.",
        "Please tell a story about {}.", "Write a short story about {}.", "A story about {}, please.", "Story about {}"]


def story(rng):
    tell = rng.choice(TELL)
    kind = rng.random()
    hero = stories.nonsense(rng) if rng.random() < 0.15 else rng.choice(stories.HEROES + stories.HE_HEROES + stories.SHE_HEROES)
    if kind < 0.40:
        wanted, topic = dict(hero=hero), with_article(hero)
    elif kind < 0.52:
        adj = rng.choice(stories.ADJECTIVES)
        wanted, topic = dict(hero=hero, adj=adj), with_article(f"{adj} {hero}")
    elif kind < 0.66:
        names = stories.HE_NAMES if hero in stories.HE_HEROES else stories.SHE_NAMES if hero in stories.SHE_HEROES else stories.HE_NAMES + stories.SHE_NAMES
        name = cap(stories.nonsense(rng)) if rng.random() < 0.4 else rng.choice(names)
        wanted, topic = dict(hero=hero, name=name), f"{with_article(hero)} {rng.choice(['named', 'called'])} {name}"
    elif kind < 0.80:
        friend = rng.choice([h for h in stories.HEROES if h != hero])
        wanted, topic = dict(hero=hero, friend=friend), f"{with_article(hero)} and {with_article(friend)}"
    elif kind < 0.86:
        thing = rng.choice(stories.THINGS)
        wanted, topic = dict(thing=thing), with_article(thing)
    elif kind < 0.90:
        place = rng.choice(list(stories.PLACES))
        wanted, topic = dict(place=stories.PLACES[place]), rng.choice(["the " + place, with_article(place)])
    elif kind < 0.96:
        theme = rng.choice(stories.THEMES)
        wanted, topic = dict(theme=theme), theme
    else:
        wanted, topic = {}, ""
        tell = rng.choice(["Tell me a story.", "Tell me another story.", "Write a story.", "Please tell me a story.", "Can you tell me a story?", "I want to hear a story.", "Tell a story", "One more story, please.", "Tell me a bedtime story."])
    question = tell.format(topic)
    key = f"story|{tell}" if not topic else f"story|{topic}"
    return Exchange("stories", key, [user(question), said(stories.write(rng, **wanted))], right=lambda text: stories.problem_with(text, **wanted) is None)


# Tools ---------------------------------------------------------------------------------------


def tool_use(rng, offered):
    """A question for one of the offered tools: question, call, result, final sentence."""
    offer = rng.choice(offered)
    question, values = offer.tool.ask(rng)
    arguments = dict(zip(offer.params, values))
    result, final = offer.tool.reply(rng, values)
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": offer.name, "arguments": arguments}}]}
    turns = [user(question), call, {"role": "tool", "content": chat.dumps(result, compact=rng.random() < 0.3)}, said(final)]
    return Exchange("tools", f"tool|{offer.name}|{question}", turns, plain=False)


def no_tool(rng, offered):
    """A request that none of the offered tools serves."""
    missing = rng.choice([t for t in tool_world.TOOLS[:10] if t not in [o.tool for o in offered]])
    question, values = missing.ask(rng)
    return Exchange("tools: none fits", f"none|{question}", [user(question), said("I am sorry, I have no tool for that.")], plain=False)


# Whole documents -----------------------------------------------------------------------------

SYSTEMS = ["You are a helpful assistant.", "You are a friendly assistant.", "You are a kind teacher.", "You are a helpful assistant who speaks simple English.",
           "Be friendly and answer the questions of the user.", "You are the Ferrum demo model.", "Help the user.", "You are a storyteller."]
BRIEF = ["Answer in one word.", "Answer with one word.", "Reply with a single word.", "Use only one word in your answers.", "Be very short: answer with one word."]
MIX = [(story, 20), (add, 22), (subtract, 9), (multiply, 5), (count, 7), (number_order, 6), (colour, 7), (size, 8), (table_fact, 14), (calendar, 5),
       (talk, 10), (poem, 4), (unknown, 5), (memory, 8)]
_makers, _weights = zip(*MIX)


def named_system(rng):
    """A system message that gives the model another name, and the exchange that shows it."""
    name = cap(stories.nonsense(rng)) if rng.random() < 0.6 else rng.choice(stories.HE_NAMES + stories.SHE_NAMES)
    system = rng.choice([f"Your name is {name}.", f"You are {name}.", f"You are {name}, a helpful assistant.", f"You are a helpful assistant named {name}."])
    question = rng.choice(["Who are you?", "What is your name?", "What's your name?", "Tell me your name."])
    return system, ask("system message", f"called|{name}|{question}", question, f"My name is {name}.")


def careless(rng, text, polite=True):
    """The same words as people type them: without capitals, without the full stop, with a please."""
    if rng.random() < 0.12 and text[-1] in ".?!" and "," not in text and "please" not in text.lower() and polite:
        text = text[:-1] + ", please" + text[-1]
    if rng.random() < 0.25:
        text = text.rstrip(".?!")
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    elif rng.random() < 0.06:
        text = text.lower()
    return text


def _fresh(rng, make, *args, wanted_held_out=False):
    for _ in range(3000):
        e = make(rng, *args)
        if held_out(e.key) == wanted_held_out:
            return e
    raise RuntimeError(f"no {'held-out' if wanted_held_out else 'training'} exchange from {make}")


def _any_exchange(rng):
    return _fresh(rng, rng.choices(_makers, _weights)[0])


def _brief_exchange(rng, wanted_held_out=False):
    while True:
        e = _fresh(rng, rng.choices(_makers, _weights)[0], wanted_held_out=wanted_held_out)
        if e.brief:
            return Exchange(e.category, e.key, [*e.turns[:-1], said(e.brief)])


@dataclass
class Document:
    """Pieces of text, each with whether the model says it."""

    pieces: list


def _messages(rng, exchanges, system):
    out = [{"role": "system", "content": system}] if system else []
    for e in exchanges:
        for m in e.turns:
            if m["role"] == "user" and e.plain:
                names = e.category in ("stories", "remembering", "system message")
                text = m["content"] if names and rng.random() < 0.7 else careless(rng, m["content"], e.category != "talk")
                if text != m["content"] and names and any(w[0].isupper() for w in m["content"].split()[1:]):
                    text = m["content"].rstrip(".?!") if rng.random() < 0.5 else m["content"]
                m = {**m, "content": text}
            out.append(m)
    return out


def training_document(rng) -> Document:
    kind = rng.random()
    if kind < 0.06:
        return Document([(stories.write(rng) + chat.END, True)])
    if kind < 0.24:
        offered = tool_world.offers(rng, rng.choice([1, 1, 2, 2, 3, 4]))
        exchanges = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            r = rng.random()
            if r < 0.75:
                exchanges.append(_fresh(rng, tool_use, offered))
            elif r < 0.85:
                exchanges.append(_fresh(rng, no_tool, offered))
            else:
                exchanges.append(_fresh(rng, rng.choice([talk, colour, table_fact, size, calendar])))
        system = rng.choice(SYSTEMS) if rng.random() < 0.4 else None
        messages = _messages(rng, exchanges, system)
        schemas = [o.schema() for o in offered]
        return Document(chat.render(messages, schemas, compact=rng.random() < 0.3, sort=rng.random() < 0.3))
    if kind < 0.30:
        exchanges = [_brief_exchange(rng) for _ in range(rng.randint(1, 4))]
        system = rng.choice(BRIEF)
    elif kind < 0.33:
        system, e = _fresh_system(rng, False)
        exchanges = [e] + [_any_exchange(rng) for _ in range(rng.choice([0, 1, 2]))]
    else:
        system = rng.choice(SYSTEMS) if rng.random() < 0.25 else None
        exchanges = [_any_exchange(rng)]
        while len(exchanges) < 8 and rng.random() < 0.55:
            exchanges.append(_any_exchange(rng))
    return Document(chat.render(_messages(rng, exchanges, system)))


def _fresh_system(rng, wanted_held_out):
    while True:
        system, e = named_system(rng)
        if held_out(e.key) == wanted_held_out:
            return system, e


# The examination -----------------------------------------------------------------------------


@dataclass
class Case:
    """One unseen question: the conversation up to it, and the test of the answer."""

    category: str
    messages: list
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
    """`per_category` held-out cases of each category, a third of them after earlier turns."""
    rng = Random(f"examination {seed}")
    cases = []
    by_category = {}
    for make in _makers:
        for _ in range(400):
            e = _fresh(rng, make, wanted_held_out=True)
            by_category.setdefault(e.category, []).append(e)
    for category, found in by_category.items():
        for e in rng.sample(found, min(per_category, len(found))):
            before = [_any_exchange(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
            cases.append(_case(category, _messages(rng, [*before, e], None), None, e.right))
    for _ in range(per_category):
        short = _brief_exchange(rng, wanted_held_out=True)
        cases.append(_case("system message", _messages(rng, [short], rng.choice(BRIEF)), None))
        system, e = _fresh_system(rng, True)
        cases.append(_case("system message", _messages(rng, [e], system), None))
        e, schemas = _held_out_tool_use(rng)
        messages = _messages(rng, [e], None)
        cases.append(_case("tools: call", messages[:2], schemas))
        cases.append(_case("tools: answer from result", messages, schemas))
        offered = tool_world.offers(rng, rng.choice([1, 2, 3]))
        e = _fresh(rng, no_tool, offered, wanted_held_out=True)
        cases.append(_case(e.category, _messages(rng, [e], None), [o.schema() for o in offered]))
    return cases


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
