"""The story grammar: generates short stories, and recognises them again.

A story is an opening, one plot (a list of steps, each with several wordings) and a closing.
Slots in braces are filled once per story, so names, pronouns and places stay consistent.
`problem_with` is the same grammar read backwards: it says why a text is not such a story.
"""

import re
from dataclasses import dataclass
from random import Random

HEROES = """fox rabbit bear owl mouse cat dog frog duck turtle hedgehog squirrel wolf deer pony lion
elephant monkey penguin tiger pig goat sheep bird dragon robot wizard knight farmer pirate sailor baker
fairy giant ghost unicorn mermaid horse cow bee ant snail whale dolphin crab kitten puppy child painter
teacher doctor gardener fisherman spider butterfly parrot kangaroo camel zebra giraffe hippo crow swan
donkey badger otter beaver bat lizard seal witch astronaut singer clown""".split()
HE_HEROES = "boy prince king man grandfather".split()
SHE_HEROES = "girl princess queen woman grandmother".split()
HE_NAMES = "Tom Ben Max Leo Sam Finn Oscar Hugo Felix Jack Theo Milo Otto Karl Paul Peter Bruno Toby Oliver Emil".split()
SHE_NAMES = "Anna Lily Mia Rosa Ella Nora Clara Ruby Daisy Luna Zoe Emma Olga Greta Ivy Molly Sara Tina Hazel Julia".split()
ADJECTIVES = """little brave shy clever kind curious lonely hungry sleepy proud gentle quiet young old small
friendly silly happy tired careful""".split()
PLACES = {
    "forest": "in a deep forest", "meadow": "in a sunny meadow", "village": "in a quiet village",
    "mountain": "on a high mountain", "castle": "in an old castle", "garden": "in a green garden",
    "island": "on a small island", "river": "by a wide river", "farm": "on a small farm",
    "valley": "in a cold valley", "sea": "by the blue sea", "city": "in a busy city",
    "hill": "on a windy hill", "lake": "by a clear lake", "desert": "in a hot desert", "town": "in a little town",
}
THINGS = """kite ball lantern book hat ring key drum blanket boat basket bell scarf flute clock cup map umbrella
bicycle coat necklace teddy toy crown spoon mirror""".split()
FOODS = ["apples", "berries", "nuts", "carrots", "honey cakes", "cookies", "pears", "bread rolls", "cherries", "plums"]
SPOTS = ["under the bed", "behind the door", "in the tall grass", "under the bridge", "in the hollow tree",
         "behind the big rock", "near the well", "in the barn", "under a pile of leaves", "by the old gate"]
SKILLS = ["swim", "sing", "bake bread", "dance", "paint", "play the flute", "ride a bicycle", "whistle", "juggle", "skate"]
FEARS = ["the dark", "thunder", "deep water", "high places", "strange noises", "the wind", "shadows", "the long night"]
TRAPS = {"net": "knife", "hole": "rope", "cage": "key", "muddy ditch": "long branch", "thorn bush": "stick"}
THEMES = "friendship courage kindness patience honesty sharing".split()

# Slots: hero adj name he him his | friend fadj fname | place | thing food spot1 spot2 skill fear trap tool
OPENINGS = [
    "Once upon a time, there was a(n) {adj} {hero} named {name} who lived {place}.",
    "Once upon a time, a(n) {adj} {hero} named {name} lived {place}.",
    "Once upon a time, there was a(n) {adj} {hero}. {His} name was {name}, and {he} lived {place}.",
    "Long ago, a(n) {adj} {hero} named {name} lived {place}.",
    "There once was a(n) {adj} {hero} named {name}. {He} lived {place}.",
]
ARRIVALS = [
    "Just then, a(n) {fadj} {friend} named {fname} came by.",
    "Soon {he} met a(n) {fadj} {friend} named {fname}.",
    "A(n) {fadj} {friend} named {fname} saw {him} and stopped.",
    "Then a(n) {fadj} {friend} named {fname} walked up to {him}.",
]
FRIENDS_NOW = [
    "From that day on, {name} and {fname} were best friends.",
    "After that, {name} and {fname} played together every day.",
    "And so {name} and the {friend} became good friends.",
]
CLOSINGS = [
    "The end.",
    "That night, {name} fell asleep with a smile.",
    "And they lived happily ever after.",
    "{name} never forgot that day.",
]


@dataclass(frozen=True)
class Plot:
    theme: str
    steps: tuple


PLOTS = {
    "lost thing": Plot("friendship", (
        ["{name} had a red {thing} and loved it very much.", "The best thing {name} had was a shiny {thing}.",
         "{name} took {his} old {thing} everywhere."],
        ["One morning, the {thing} was gone.", "One day, {name} could not find the {thing}.",
         "But one day, the {thing} was lost."],
        ["{He} looked {spot1} and {spot2}, but it was not there.", "{name} looked {spot1}. Then {he} looked {spot2}. There was no {thing}.",
         "{He} searched {spot1} and {spot2}, but {he} found nothing."],
        ["{name} sat down and began to cry.", "{name} felt very sad.", "{He} did not know what to do."],
        ARRIVALS,
        ['"Why are you so sad?" asked {fname}. "I lost my {thing}," said {name}.',
         '"What is wrong?" asked the {friend}. "My {thing} is gone," said {name}.'],
        ['"Do not worry, I will help you," said {fname}.', '"Let us look for it together," said the {friend}.'],
        ["They looked all day, and at last they found the {thing} high up in a tree.",
         "They walked a long way, and there was the {thing}, lying by the path.",
         "Together they looked again, and {fname} found the {thing} behind a bush."],
        ["{name} was so happy that {he} danced.", "{name} laughed and thanked {his} new friend.", '"Thank you!" cried {name}.'],
        FRIENDS_NOW)),
    "stuck thing": Plot("kindness", (
        ["One day, {name} was playing with {his} {thing}.", "{name} liked to play outside with {his} new {thing}."],
        ["A strong wind came and blew the {thing} up into a tall tree.", "Suddenly the {thing} flew up and got stuck on a high roof."],
        ["{name} jumped and jumped, but {he} could not reach it.", "{He} tried to climb up, but {he} slipped and fell down."],
        ["{name} felt very sad.", '"Oh no," said {name}. "I will never get it back."'],
        ARRIVALS,
        ['"I can help you," said the {friend}.', '"Let me try," said {fname} kindly.'],
        ["The {friend} climbed up, took the {thing}, and gave it back to {name}.",
         "{fname} shook it with a long stick until the {thing} fell down."],
        ["{name} was very happy. \"You are so kind,\" {he} said.", '"Thank you for your help!" said {name}.'],
        ["{name} gave {fname} some {food}, and they ate them together.", "To say thank you, {name} shared some {food} with the {friend}."],
        ["{name} learned that a small kind act can make a big difference.", "From then on, {name} was kind to everyone {he} met."])),
    "fear": Plot("courage", (
        ["{name} was afraid of {fear}.", "There was only one problem: {name} was afraid of {fear}."],
        ["All the others laughed at {him}, and that made {him} sad.", "{He} never told anyone about it.",
         "Every night, {he} hid under {his} blanket."],
        ["One evening, {name} heard a small voice calling for help.", "One night, somebody outside called for help."],
        ["It was a(n) {fadj} {friend} named {fname} who had fallen into a hole.", "It was {fname}, a(n) {fadj} {friend} who was lost."],
        ["{name} was scared, but {he} took a deep breath.", '"I am scared," thought {name}, "but I must help."'],
        ["{He} took a lantern and went out to find the {friend}.", "Step by step, {he} walked out to help {fname}."],
        ["{He} held out {his} hand and brought {fname} home.", "Soon {fname} was safe and warm again."],
        ['"You are very brave," said {fname}.', '"You saved me!" said the {friend}.'],
        ["After that, {name} was not afraid of {fear} any more.", "{name} looked around and saw that {fear} could not hurt {him}."],
        ["{name} had learned that you can be brave even when you are afraid.", "{name} was proud, for {he} had found {his} courage."])),
    "learn skill": Plot("patience", (
        ["More than anything, {name} wanted to learn to {skill}.", "{name} had one big dream: {he} wanted to {skill}."],
        ["{He} tried and tried, but it did not work.", "The first time {he} tried, everything went wrong."],
        ['"I will never learn it," said {name}.', "{name} wanted to give up."],
        ARRIVALS,
        ['"I can {skill}," said {fname}. "I will show you how."', '"It takes time to learn to {skill}," said the {friend}. "Let me help you."'],
        ["Every morning, {name} and {fname} practiced together.", "They practiced every day, in the sun and in the rain."],
        ["Slowly, {name} got better and better.", "At first it was hard, but then it became easy."],
        ["After many weeks, {name} could {skill} very well.", "At last, {name} could {skill} better than anyone else."],
        ["Everyone came to watch, and they clapped and cheered.", "{fname} was very proud of {him}."],
        ["{name} had learned that good things take time.", "{name} knew now that patience is a great gift."])),
    "sharing food": Plot("sharing", (
        ["One day, {name} found a basket full of {food}.", "One autumn day, {name} gathered a big heap of {food}."],
        ['"These are all for me," said {name}.', "{He} wanted to eat all the {food} by {his} own fire."],
        ARRIVALS,
        ['"I am so hungry," said {fname}. "I have not eaten for two days."', '"Please, may I have some food?" asked the {friend}.'],
        ["{name} looked at the {food}, and then {he} looked at the {friend}.", "{name} thought about it for a moment."],
        ['"Come and eat with me," said {name}.', "{He} smiled and gave half of the {food} to {fname}."],
        ["They ate until they were full, and they told each other stories.", "Then they sat in the sun and ate the {food} together."],
        ["When winter came, {name} had nothing left to eat.", "Some time later, {name} fell ill and could not find food."],
        ["But {fname} came to the door with a pot of warm soup.", "But the {friend} had not forgotten {him} and brought {him} bread and soup."],
        ["{name} learned that the one who shares is never alone.", "And {name} was glad that {he} had shared."])),
    "storm": Plot("friendship", (
        ["{name} had built a small house of wood.", "{name} lived in a little house with a green door."],
        ["One night, a big storm came.", "One dark night, the wind began to howl."],
        ["The wind blew the roof away, and the rain came in.", "The old tree fell on the house and broke it."],
        ["In the morning, {name} stood in front of the broken house.", "{name} was cold and wet, and {he} had no home."],
        ARRIVALS,
        ['"You can stay with me," said {fname}.', '"Come to my house and get warm," said the {friend}.'],
        ["The next day, they began to build a new house.", "Then they fetched wood and stones for a new house."],
        ["{name} carried the wood, and {fname} worked with the hammer.", "They worked from morning until night."],
        ["After a week, the new house was ready, and it was stronger than before.", "Soon a fine new house stood there."],
        FRIENDS_NOW)),
    "lost way": Plot("kindness", (
        ["One day, {name} followed a yellow butterfly.", "One afternoon, {name} went for a long walk."],
        ["{He} walked on and on, and {he} did not look back.", "{He} walked so far that {he} forgot the time."],
        ["When the sun went down, {name} did not know the way home.", "Then it got dark, and {name} was lost."],
        ['"Where am I?" {he} said.', "{He} was cold and tired."],
        ARRIVALS,
        ['"I want to go home," said {name}, "but I cannot find the way."', '"Are you lost?" asked {fname}. {name} nodded.'],
        ['"Look at the bright star," said {fname}. "It will lead us."', '"Follow me," said the {friend}. "I know every path."'],
        ["They walked side by side through the night.", "{fname} carried a lantern, and {name} stayed close."],
        ["At last, {name} saw the light in {his} own window.", "When the morning came, {name} was home again."],
        ['{name} gave {fname} some {food} and said, "Thank you for your kindness."', '"You are a true friend," said {name} to the {friend}.'])),
    "lonely": Plot("friendship", (
        ["{name} had a nice home, but {he} had nobody to play with.", "{name} was often alone and wished for a friend."],
        ["Every day, {he} looked out of the window and sighed.", "Every day, {he} played all by {his} favorite tree."],
        ["One spring morning, somebody new moved in next door.", "Then, one day, there was a knock at the door."],
        ["It was a(n) {fadj} {friend} named {fname}.", "There stood {fname}, a(n) {fadj} {friend}."],
        ["{name} was too shy to speak at first.", "{name} did not know what to say."],
        ["Then {he} picked up {his} {thing} and held it out. \"Do you want to play?\" {he} asked.",
         '"Would you like to see my {thing}?" {he} asked at last.'],
        ['"I would love to," said {fname}.', 'The {friend} smiled and said, "Yes, please!"'],
        ["They played with the {thing} until the sun went down.", "All day long, they laughed and played."],
        ["{name} was not lonely any more.", "That was the happiest day of {name}'s life."],
        FRIENDS_NOW)),
    "found thing": Plot("honesty", (
        ["One day, {name} found a golden {thing} on the path.", "While {he} was walking, {name} found a silver {thing}."],
        ['"How beautiful!" said {name}. "I want to keep it."', "It was the most beautiful thing {he} had ever seen."],
        ["But the next day, {he} saw a(n) {fadj} {friend} named {fname} who was crying.",
         "Then {he} met {fname}, a(n) {fadj} {friend} who looked very sad."],
        ['"I have lost my {thing}," said {fname}. "It was a gift from my mother."', '"Have you seen my {thing}?" asked the {friend}. "I lost it."'],
        ["{name} wanted to say no, but {he} knew that it was wrong.", "{name} thought about it for a long time."],
        ['"I found it, and it is yours," said {name}.', "Then {he} told the truth and gave the {thing} back."],
        ["{fname} was so happy that the tears went away.", '"Thank you for being honest," said the {friend}.'],
        ["As a reward, {fname} gave {him} a basket of {food}.", "The next day, {fname} brought {him} some {food}."],
        ["{name} felt light and glad.", "{name} learned that it is always best to tell the truth."],
        FRIENDS_NOW)),
    "birthday": Plot("friendship", (
        ["It was {name}'s birthday.", "One morning, {name} woke up and was very excited, for it was {his} birthday."],
        ["But nobody said a word about it.", "But when {he} went out, nobody was there."],
        ['"They have all forgotten me," thought {name}.', "{name} walked home slowly and felt sad."],
        ["In the afternoon, a(n) {fadj} {friend} named {fname} came to the door.", "Then {fname}, a(n) {fadj} {friend}, knocked at the window."],
        ['"Please come with me," said {fname}. "I need your help."', '"Come quickly!" said the {friend}.'],
        ["{name} followed {fname} to the big oak tree.", "They walked to the old barn together."],
        ['There were lights and flowers, and everyone shouted, "Happy birthday!"', 'All the others were there. "Surprise!" they cried.'],
        ["There was a big cake, and there were {food} for everyone.", "They ate cake and {food} and sang songs."],
        ["{fname} gave {him} a new {thing} as a present.", "The best present was a blue {thing} from {fname}."],
        ["It was the best birthday ever.", "{name} was very happy, for {he} had good friends."])),
    "rescue": Plot("courage", (
        ["One day, {name} heard a cry.", "One cold morning, {name} heard somebody shout for help."],
        ["A(n) {fadj} {friend} named {fname} was stuck in a {trap}.", "It was {fname}, a(n) {fadj} {friend} who was trapped in a {trap}."],
        ['"Please help me!" cried {fname}.', '"I cannot get out," said the {friend}.'],
        ["{name} was small, but {he} was not afraid.", "{name} did not run away."],
        ["{He} ran home and came back with a {tool}.", '"Wait here," {he} said, and {he} went to get a {tool}.'],
        ["{He} worked hard, and soon {fname} was free.", "With the {tool}, {he} got the {friend} out of the {trap}."],
        ['"You saved my life," said {fname}.', '"How brave you are!" said the {friend}.'],
        ['"Anyone would have helped," said {name}.', "{name} smiled and was a little proud."],
        ["They shared some {food} and talked until evening.", "Then {fname} invited {him} to a big dinner."],
        FRIENDS_NOW)),
    "race": Plot("patience", (
        ["{name} was sure that nobody was faster than {him}.", '"I am the fastest of all," {name} often said.'],
        ["One day, a(n) {fadj} {friend} named {fname} asked {him} to run a race.", "Then {fname}, a(n) {fadj} {friend}, wanted to run a race with {him}."],
        ["Everyone came to see the race.", "They met at the old bridge the next morning."],
        ["{name} ran off as fast as {he} could.", "At the start, {name} was far ahead."],
        ["But {he} did not look where {he} was going, and {he} fell into a {trap}.", "Then {he} got tired and sat down to rest, and {he} fell asleep."],
        ["{fname} ran slowly but never stopped.", "The {friend} went on, step by step."],
        ["When {name} got up again, {fname} had already won.", "In the end, {fname} was the first to reach the big tree."],
        ['"You won," said {name}. "You never gave up."', '{name} was sad, but {he} said, "Well done!"'],
        ['"Let us run together next time," said {fname}.', "The {friend} smiled and shared some {food} with {him}."],
        ["{name} learned that slow and steady is often best.", "After that, {name} did not boast any more."])),
}
THING_PLOTS = ["lost thing", "stuck thing", "lonely", "found thing"]

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
AN_EXCEPTIONS = ("uni", "use", "one", "eu")


def article(word: str) -> str:
    vowel = word[0].lower() in "aeiou" and not word.lower().startswith(AN_EXCEPTIONS)
    return "an" if vowel else "a"


def with_article(phrase: str) -> str:
    return f"{article(phrase)} {phrase}"


def nonsense(rng: Random) -> str:
    """A made-up word, so that the model learns to copy names it has never seen."""
    onset = "b d f g k l m n p r s t v z bl dr gr pl st tr sh ch w j h".split()
    vowel = "a e i o u a o i oo ee".split()
    coda = ["", "", "n", "r", "x", "b", "m", "k", "l", "p", "t", "s"]
    word = "".join(rng.choice(onset) + rng.choice(vowel) for _ in range(rng.randint(1, 2)))
    return word + rng.choice(onset[:14]) + rng.choice("aeiou") + rng.choice(coda)


def fill(template: str, slots: dict) -> str:
    text = re.sub(r"\{(\w+)\}", lambda m: _slot(m.group(1), slots), template)
    return re.sub(r"\b([Aa])\(n\) (\w+)", lambda m: m.group(1) + article(m.group(2))[1:] + " " + m.group(2), text)


def _slot(key: str, slots: dict) -> str:
    value = slots[key.lower()]
    return value[0].upper() + value[1:] if key[0].isupper() else value


def write(rng: Random, **fixed) -> str:
    """One story; `fixed` holds slots (and `theme` or `plot`) that the request has set."""
    hero = fixed.get("hero") or (nonsense(rng) if rng.random() < 0.08 else rng.choice(HEROES + HE_HEROES + SHE_HEROES))
    name = fixed.get("name")
    if hero in HE_HEROES or name in HE_NAMES:
        gender = "he"
    elif hero in SHE_HEROES or name in SHE_NAMES:
        gender = "she"
    else:
        gender = rng.choice(["he", "she"])
    he, him, his = PRONOUNS[gender]
    name = name or rng.choice(HE_NAMES if gender == "he" else SHE_NAMES)
    friend = rng.choice([h for h in HEROES if h != hero])
    spot1, spot2 = rng.sample(SPOTS, 2)
    trap = rng.choice(list(TRAPS))
    slots = dict(hero=hero, adj=rng.choice(ADJECTIVES), name=name, he=he, him=him, his=his, friend=friend,
                 fadj=rng.choice(ADJECTIVES), fname=rng.choice([n for n in HE_NAMES + SHE_NAMES if n != name]),
                 place=rng.choice(list(PLACES.values())), thing=rng.choice(THINGS), food=rng.choice(FOODS),
                 spot1=spot1, spot2=spot2, skill=rng.choice(SKILLS), fear=rng.choice(FEARS), trap=trap, tool=TRAPS[trap])
    slots.update({k: v for k, v in fixed.items() if k in slots})
    plots = [k for k, p in PLOTS.items() if fixed.get("theme") in (None, p.theme)]
    if "thing" in fixed:
        plots = THING_PLOTS
    if "plot" in fixed:
        plots = [fixed["plot"]]
    steps = [OPENINGS, *PLOTS[rng.choice(plots)].steps, CLOSINGS]
    return " ".join(fill(rng.choice(step), slots) for step in steps)


# The grammar read backwards ------------------------------------------------------------------

_CLOSED = dict(adj=ADJECTIVES, fadj=ADJECTIVES, place=list(PLACES.values()), food=FOODS, spot1=SPOTS, spot2=SPOTS,
               skill=SKILLS, fear=FEARS, trap=list(TRAPS), tool=list(TRAPS.values()))
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

    for key, plot in PLOTS.items():
        bound = walk([OPENINGS, *plot.steps, CLOSINGS], 0, {})
        if bound is not None:
            bound = {**bound, "plot": key, "theme": plot.theme}
            wrong = {k: (v, bound.get(k)) for k, v in wanted.items() if bound.get(k) != v}
            return f"wanted/got {wrong}" if wrong else None
    return "grammar: ..." + text[max(0, furthest[0] - 20): furthest[0] + 60]
