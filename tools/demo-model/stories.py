"""The story grammar: generates short stories, and recognises them again.

A story is an opening, one plot (a list of steps, each with a wording or two) and a closing.
Slots in braces are filled once per story, so names, pronouns and places stay consistent.
`problem_with` is the same grammar read backwards: it says why a text is not such a story.
"""

import re
from random import Random

HEROES = """fox rabbit bear owl mouse cat dog frog duck turtle squirrel wolf lion elephant monkey penguin pig bird
dragon robot knight wizard""".split()
HE_NAMES = "Tom Ben Max Leo Sam Finn Oscar Felix Jack Paul".split()
SHE_NAMES = "Anna Lily Mia Rosa Ella Nora Clara Ruby Luna Emma".split()
# Friends are others than heroes, so that a story never has two foxes or two Annas, and after their
# first appearance they go by their name.
FRIENDS = "hedgehog badger otter goose donkey goat swan deer".split()
FRIEND_NAMES = "Pip Bella Coco Toby Milo Daisy Hugo Olive".split()
ADJECTIVES = "little brave shy clever kind lonely hungry happy old young".split()
PLACES = ["in a deep forest", "in a quiet village", "on a high mountain", "in an old castle", "in a green garden",
          "on a small island", "by a wide river", "by the blue sea"]
THINGS = "kite ball book hat ring drum bell boat".split()
FOODS = ["apples", "berries", "nuts", "carrots", "cookies"]
SPOTS = ["under the bed", "behind the door", "in the tall grass", "under the bridge", "in the barn"]
SKILLS = ["swim", "sing", "dance", "paint", "bake bread"]
TRAPS = {"net": "knife", "hole": "rope", "cage": "key"}

# Slots: hero adj name he him his | friend fadj fname | place thing food spot1 spot2 skill trap tool
OPENINGS = [
    "Once upon a time, there was a(n) {adj} {hero} named {name} who lived {place}.",
    "Once upon a time, a(n) {adj} {hero} named {name} lived {place}.",
]
ARRIVALS = [
    "Then a(n) {fadj} {friend} named {fname} came by.",
    "Soon {he} met a(n) {fadj} {friend} named {fname}.",
]
FRIENDS_NOW = [
    "From that day on, {name} and {fname} were best friends.",
    "After that, {name} and {fname} played together every day.",
]
CLOSINGS = ["The end.", "{name} never forgot that day."]

# A plot is its steps, a step is its wordings.
PLOTS = {
    "lost thing": (
        ["{name} had a red {thing} and loved it very much.", "The best thing {name} had was a shiny {thing}."],
        ["One day, the {thing} was gone.", "But one day, {name} could not find the {thing}."],
        ["{He} looked {spot1} and {spot2}, but it was not there."],
        ARRIVALS,
        ['"Why are you so sad?" asked {fname}. "I lost my {thing}," said {name}.'],
        ["Together they looked again, and {fname} found the {thing} behind a bush.",
         "They looked all day, and at last they found the {thing} in a tree."],
        ['"Thank you!" cried {name}.', "{name} was so happy that {he} danced."],
        FRIENDS_NOW),
    "learning": (
        ["More than anything, {name} wanted to learn to {skill}.", "{name} had one big dream: {he} wanted to {skill}."],
        ["{He} tried and tried, but it did not work."],
        ['"I will never learn it," said {name}.', "{name} wanted to give up."],
        ARRIVALS,
        ['"I can {skill}," said {fname}. "I will show you how."'],
        ["Every day, {name} and {fname} practiced together.", "They practiced in the sun and in the rain."],
        ["At last, {name} could {skill} very well."],
        ["{name} had learned that good things take time.", "{fname} was very proud of {him}."]),
    "sharing": (
        ["One day, {name} found a basket full of {food}.", "One morning, {name} gathered a big heap of {food}."],
        ['"These are all for me," said {name}.'],
        ARRIVALS,
        ['"I am so hungry," said {fname}.', '"Please, may I have some food?" asked {fname}.'],
        ["{name} looked at the {food}, and then {he} looked at {fname}."],
        ['"Come and eat with me," said {name}.', "{He} smiled and gave half of the {food} to {fname}."],
        ["They sat in the sun and ate the {food} together."],
        FRIENDS_NOW),
    "lost way": (
        ["One day, {name} went for a long walk.", "One day, {name} followed a yellow butterfly."],
        ["Then it got dark, and {name} did not know the way home."],
        ['"Where am I?" {he} said.', "{He} was cold and tired."],
        ARRIVALS,
        ['"Are you lost?" asked {fname}. {name} nodded.'],
        ['"Follow me," said {fname}. "I know every path."', '"Look at the bright star," said {fname}. "It will lead us."'],
        ["They walked side by side, and soon {name} was home again."],
        ['{name} gave {fname} some {food} and said, "Thank you!"', '"You are a true friend," said {name} to {fname}.']),
    "rescue": (
        ["One day, {name} heard somebody shout for help.", "One cold morning, {name} heard a cry."],
        ["It was {fname}, a(n) {fadj} {friend} who was stuck in a {trap}."],
        ['"Please help me!" cried {fname}.', '"I cannot get out," said {fname}.'],
        ["{name} was afraid, but {he} did not run away."],
        ["{He} ran home and came back with a {tool}."],
        ["With the {tool}, {he} got {fname} out of the {trap}.", "{He} worked hard, and soon {fname} was free."],
        ['"You saved my life," said {fname}.', '"How brave you are!" said {fname}.'],
        FRIENDS_NOW),
}

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
AN_EXCEPTIONS = ("uni", "use", "one", "eu")


def article(word: str) -> str:
    vowel = word[0].lower() in "aeiou" and not word.lower().startswith(AN_EXCEPTIONS)
    return "an" if vowel else "a"


def with_article(phrase: str) -> str:
    return f"{article(phrase)} {phrase}"


def nonsense(rng: Random) -> str:
    """A made-up word, for questions that nobody can answer."""
    onset = "b d f g k l m n p r s t v z bl dr gr pl st tr sh ch w j h".split()
    vowel = "a e i o u a o i oo ee".split()
    coda = ["", "", "n", "r", "x", "b", "m", "k", "l", "p", "t", "s"]
    return rng.choice(onset) + rng.choice(vowel) + rng.choice(onset[:14]) + rng.choice("aeiou") + rng.choice(coda)


def fill(template: str, slots: dict) -> str:
    text = re.sub(r"\{(\w+)\}", lambda m: _slot(m.group(1), slots), template)
    return re.sub(r"\b([Aa])\(n\) (\w+)", lambda m: m.group(1) + article(m.group(2))[1:] + " " + m.group(2), text)


def _slot(key: str, slots: dict) -> str:
    value = slots[key.lower()]
    return value[0].upper() + value[1:] if key[0].isupper() else value


def write(rng: Random, **fixed) -> str:
    """One story; `fixed` holds the slots that the request has set."""
    hero = fixed.get("hero") or rng.choice(HEROES)
    name = fixed.get("name")
    if name in HE_NAMES:
        gender = "he"
    elif name in SHE_NAMES:
        gender = "she"
    else:
        gender = rng.choice(["he", "she"])
    he, him, his = PRONOUNS[gender]
    name = name or rng.choice(HE_NAMES if gender == "he" else SHE_NAMES)
    spot1, spot2 = rng.sample(SPOTS, 2)
    trap = rng.choice(list(TRAPS))
    slots = dict(hero=hero, adj=rng.choice(ADJECTIVES), name=name, he=he, him=him, his=his,
                 friend=rng.choice(FRIENDS), fadj=rng.choice(ADJECTIVES),
                 fname=rng.choice(FRIEND_NAMES), place=rng.choice(PLACES),
                 thing=rng.choice(THINGS), food=rng.choice(FOODS), spot1=spot1, spot2=spot2, skill=rng.choice(SKILLS),
                 trap=trap, tool=TRAPS[trap])
    slots.update(fixed)
    steps = [OPENINGS, *rng.choice(list(PLOTS.values())), CLOSINGS]
    return " ".join(fill(rng.choice(step), slots) for step in steps)


# The grammar read backwards ------------------------------------------------------------------

_CLOSED = dict(adj=ADJECTIVES, fadj=ADJECTIVES, place=PLACES, food=FOODS, spot1=SPOTS, spot2=SPOTS,
               thing=THINGS, skill=SKILLS, trap=list(TRAPS), tool=list(TRAPS.values()))
_compiled = {}


def _pattern(template: str):
    if template not in _compiled:
        seen = set()

        def group(m):
            key = m.group(1)
            if key in seen:
                return f"(?P={key})"
            seen.add(key)
            values = _CLOSED.get(key)
            inner = "|".join(map(re.escape, values)) if values else "[A-Za-z]+"
            return f"(?P<{key}>{inner})"

        source = re.escape(template).replace(r"\{", "{").replace(r"\}", "}").replace(r"\ ", " ")
        source = re.sub(r"([Aa])\\\(n\\\)", r"(?:\1n?)", source)
        _compiled[template] = re.compile(re.sub(r"\{(\w+)\}", group, source) + r"(?: |$)")
    return _compiled[template]


def _bind(groups: dict, bound: dict):
    out = dict(bound)
    for key, value in groups.items():
        if key[0].isupper():
            key, value = key.lower(), value.lower()
        if out.setdefault(key, value) != value:
            return None
    genders = [g for g, (he, him, his) in PRONOUNS.items()
               if out.get("he", he) == he and out.get("him", him) == him and out.get("his", his) == his]
    if out.get("name") in HE_NAMES and "he" not in genders or out.get("name") in SHE_NAMES and "she" not in genders:
        return None
    if out.get("name", 0) == out.get("fname", 1) or out.get("hero", 0) == out.get("friend", 1):
        return None
    return out if genders else None


def problem_with(text: str, **wanted):
    """`None` for a story of this grammar with the `wanted` slots, else what is wrong."""
    for a, word in re.findall(r"\b([Aa]n?) ([A-Za-z]+)", text):
        if article(word) != a.lower():
            return f"article: {a} {word}"
    furthest = [0]

    def walk(steps, at, bound):
        furthest[0] = max(furthest[0], at)
        if not steps:
            return bound if at == len(text) else None
        for template in steps[0]:
            m = _pattern(template).match(text, at)
            if m and (b := _bind(m.groupdict(), bound)) is not None:
                if (found := walk(steps[1:], m.end(), b)) is not None:
                    return found
        return None

    for plot in PLOTS.values():
        bound = walk([OPENINGS, *plot, CLOSINGS], 0, {})
        if bound is not None:
            wrong = {k: (v, bound.get(k)) for k, v in wanted.items() if bound.get(k) != v}
            return f"wanted/got {wrong}" if wrong else None
    return "grammar: ..." + text[max(0, furthest[0] - 20): furthest[0] + 60]
