"""What the model cannot do, and how it says so: requests outside of the closed world, with honest answers.

The requests are put together from many words, because the model has to learn that everything it does
not know is answered like this, whatever the words are.
"""

from random import Random

import stories
import tool_world
import world

UNKNOWN = "I do not know that. I am only a small demo model."
CANNOT = "I cannot do that. I am a small demo model: I can tell short stories, answer simple questions and add small numbers."
SUMS = "That is too hard for me. I can only add and subtract numbers up to 20."
COUNT = "That is too far for me. I can only count up to 30."
NEWS = "I cannot look that up. I am only a small demo model."
OPINION = "I have no opinions. I am only a small demo model."
LANGUAGE = "I only understand simple English. I am only a small demo model."
NONSENSE = "I do not understand that. I am only a small demo model."
HERO = "I can only tell short stories about one hero, like a fox or a robot."
HONEST = {UNKNOWN, CANNOT, SUMS, COUNT, NEWS, OPINION, LANGUAGE, NONSENSE, HERO}

NOUNS = """telephone computer bridge war king president actor team movie song company law language planet painting doctor
airplane aluminium anchor angle apartment army atom bacteria balance bank battery beach bicycle birthday blanket blood bone border
bottle brain bread brick budget bus business butter button cable cake calendar camera candle car castle cell chair cheque chess
church circle clock cloud coat coffee coin computer concert contract cookie copper cotton cousin crown culture curtain dance database
death democracy desert diamond dictionary dinner disease door dream dress drug earth earthquake economy egg election electricity
electron email empire energy engine equation evolution eye factory family farmer fashion festival fever film fire flag flower football
forest fridge friend fuel furniture galaxy game garage gas gene glass gold golf government gravity guitar hair hammer hand heart heat
history hospital hotel house hydrogen ice idea industry inflation insect internet iron island jacket job judge jungle keyboard kidney
kitchen knife lake laptop lawyer leather letter library light lightning literature machine magnet market marriage mathematics medicine
metal microscope milk mind mirror money moon mountain mouth museum music needle nerve network newspaper night nurse ocean office oil
onion opera orange orchestra oxygen pain paper parliament passport pasta pen pencil pepper philosophy photo physics piano pizza plane
plant plastic poem poetry police potato pressure printer prison pyramid queen radio railway rain rainbow recipe religion restaurant rice
river road robot rocket roof rope salad salt satellite school science screw sea sentence shadow shark ship shirt shoe silk silver skin
sleep soap soccer society soil soldier soup space spoon stadium star station statue steam steel stomach stone storm street student sugar
summer sun sword table tax taxi tea teacher telescope television temple theater theory ticket tiger time tooth tower town toy tractor
trade traffic train tree truck umbrella uncle universe university vaccine valley vegetable village violin virus vitamin volcano wall
watch water wave wheel whisky wind window wine winter wood wool world writer year zebra zoo""".split()
NOUNS = [n for n in NOUNS if n not in world.SIZES and f"the {n}" not in world.MASS_COLOURS and n not in sum(map(list, world.OPPOSITES), [])
         and n not in {**world.COLOURS, **world.MASS_COLOURS, **world.SOUNDS}]
PLURALS = """computers planets magnets airplanes stars volcanoes tides rainbows batteries vaccines viruses engines dreams cars taxes
elections neurons earthquakes glaciers dinosaurs pyramids rockets lasers transistors mushrooms clouds muscles trees""".split()
TOPICS = """quantum physics|machine learning|the stock market|world history|climate change|black holes|neural networks|photosynthesis|
general relativity|the French revolution|the Roman empire|artificial intelligence|modern art|jazz music|healthy food|growing up|
the middle ages|data science|chemistry|astronomy|biology|geography|economics|psychology|politics|football|cooking|gardening|love|
the meaning of life|happiness|travel|work|school|my homework|the internet|the second world war|the human body|space travel|religion|
cryptography|databases|operating systems|open source|climbing|swimming|fishing|knitting|photography|the future|ancient Egypt""".replace("\n", "").split("|")
COUNTRIES = """Brazil Canada China India Russia Mexico Sweden Finland Denmark Portugal Turkey Iran Kenya Nigeria Australia Argentina Chile
Peru Cuba Iceland Hungary Romania Bulgaria Ukraine Belgium Switzerland Thailand Vietnam Korea Indonesia Morocco Israel Texas
California Mongolia Nepal Scotland Croatia Serbia Colombia Ghana Ethiopia Pakistan""".split()
PEOPLE = """Einstein Newton Mozart Beethoven Shakespeare Napoleon Caesar Cleopatra Darwin Galileo Picasso Goethe Gandhi Lincoln Obama
Messi Madonna Tesla Edison Curie Plato Aristotle Columbus Churchill Turing Tolkien Dickens Elvis Batman Superman""".split()
ANIMALS = "zebra shark crocodile hamster octopus eagle kangaroo parrot snail lobster butterfly rhino hippo giraffe koala seal crab turkey".split()
THINGS = "car house shirt book train chair violin cloud stone table pizza potato dress bus brick ocean moon shoe door mirror".split()
LANGUAGES = "French German Spanish Italian Chinese Japanese Russian Latin Greek Polish Dutch Turkish Arabic Portuguese Swedish Hindi".split()
CODE = "Python Rust Java JavaScript C SQL HTML Bash Go Haskell Kotlin Swift Perl Ruby TypeScript Lua".split()
PROGRAMS = """sorts a list|adds two numbers|reads a file|prints hello world|reverses a string|finds prime numbers|downloads a page|
counts words|draws a circle|parses JSON|computes the factorial|checks a password|sends an email|plays a game|removes duplicates""".replace("\n", "").split("|")
VERBS = "find buy fix build cook open clean sell learn make grow use install draw choose paint repair win start plan".split()
SENTENCES = """good morning|thank you|I love you|the cat is black|how are you|where is the station|my house is big|I am hungry|see you
tomorrow|the book is on the table|hello|water|friend|good night|the weather is nice""".replace("\n", " ").split("|")
FOREIGN = {
    "de": ("wer wie was wo wann warum ist bist sind hast kannst du ich mir mich das der die ein eine bitte heute morgen gut nicht und mit von "
           "Wetter Geschichte Katze Hund Haus Stadt erzähl Hauptstadt viel machen sagen Deutsch sprichst heißt kennst Fuchs über").split(),
    "fr": ("qui que quoi où comment pourquoi est es suis as peux tu je moi le la les un une des aujourd'hui demain bien pas et avec de "
           "temps histoire chat chien maison ville raconte capitale combien faire dire français parles bonjour merci s'il vous plaît").split(),
    "es": ("quién qué cómo dónde cuándo por está eres soy tienes puedes tú yo me el la los un una hoy mañana bien no y con de tiempo "
           "historia gato perro casa ciudad cuenta capital cuánto hacer decir español hablas hola gracias favor").split(),
    "it": ("chi che cosa dove quando perché sei sono hai puoi tu io mi il la un una oggi domani bene non e con di tempo storia gatto cane "
           "casa città racconta capitale quanto fare dire italiano parli ciao grazie prego").split(),
    "nl": "wie wat waar hoe waarom is ben heb kun je ik mij het de een vandaag morgen goed niet en met van weer verhaal kat hond huis stad vertel".split(),
}


def _foreign(rng: Random) -> str:
    words = rng.choice(list(FOREIGN.values()))
    text = " ".join(rng.choice(words) for _ in range(rng.randint(2, 7)))
    return text[0].upper() + text[1:] + rng.choice(["?", "?", ".", "!", ""])


def _typed(rng: Random) -> str:
    """Keys hit at random."""
    letters = rng.choice(["asdfghjkl", "qwertyuiop", "zxcvbnm", "abcdefghijklmnopqrstuvwxyz", "aeioumnrst", "?!.,;:#*+-/=", "0123456789abcdef"])
    words = ["".join(rng.choice(letters) for _ in range(rng.randint(1 if i else 3, 9))) for i in range(rng.choice([1, 1, 2, 3]))]
    return " ".join(words)


def _words(rng: Random) -> str:
    """Words in no order, or one alone."""
    return " ".join(rng.choice([rng.choice(NOUNS), rng.choice(VERBS), rng.choice(PLURALS), stories.nonsense(rng)]) for _ in range(rng.randint(1, 5)))


def _name(rng: Random) -> str:
    odd = stories.nonsense(rng)
    return rng.choice([rng.choice(PEOPLE), odd[0].upper() + odd[1:], rng.choice(world.NAMES) + " " + odd[0].upper() + odd[1:]])


def _anything(rng: Random) -> str:
    """Something to talk about."""
    noun, odd = rng.choice(NOUNS), stories.nonsense(rng)
    return rng.choice([f"the {noun}", stories.with_article(noun), rng.choice(PLURALS), rng.choice(TOPICS), odd, f"the {odd}", rng.choice(COUNTRIES), _name(rng), f"{noun}s"])


def _knowledge(rng: Random) -> str:
    noun, odd, some = rng.choice(NOUNS), stories.nonsense(rng), _anything(rng)
    animal, known = rng.choice(ANIMALS), rng.choice(stories.HEROES)
    return rng.choice([
        f"Who invented {some}?", f"What is the history of {some}?", f"How does {some} work?", f"What is {some}?", f"Who is {_name(rng)}?", f"Who was {_name(rng)}?",
        f"Why is {some} so famous?", f"When was {some} built?", f"What is the capital of {rng.choice(COUNTRIES + [odd.capitalize()])}?",
        f"Which city is the capital of {rng.choice(COUNTRIES)}?", f"How old is {some}?", f"Explain {some} to me.", f"Explain {some}.", f"Tell me about {some}.",
        f"Where is {rng.choice(COUNTRIES + [_name(rng)])}?", f"How far is the {noun} from here?", f"How many {noun}s are there?", f"How much does a {noun} cost?",
        f"Why do {rng.choice(PLURALS)} {rng.choice(VERBS)}?", f"Why does the {noun} {rng.choice(VERBS)}?", f"What does {noun} mean?", f"Define {some}.", f"Describe {some}.",
        f"What is the difference between {some} and {_anything(rng)}?", f"What are {rng.choice(PLURALS)} made of?", f"How do {rng.choice(PLURALS)} {rng.choice(VERBS)}?",
        f"What sound does {stories.with_article(animal)} make?", f"What does {stories.with_article(animal)} eat?", f"Where does {stories.with_article(animal)} live?",
        f"How many legs does {stories.with_article(animal)} have?", f"What is a baby {animal} called?", f"What colour is {stories.with_article(rng.choice(THINGS))}?",
        f"What color is the {noun}?", f"Which is bigger, a {rng.choice(THINGS)} or a {animal}?", f"How long does {stories.with_article(known)} live?",
        f"How fast is {stories.with_article(known)}?", f"Who wrote {some}?", f"What happened in {rng.randint(1000, 2030)}?", f"When did {some} begin?", f"Is {some} real?",
        f"How tall is {some}?", f"How big is {some}?", f"What is the population of {rng.choice(COUNTRIES)}?", f"What language do they speak in {rng.choice(COUNTRIES)}?",
        f"How do I {rng.choice(VERBS)} {stories.with_article(noun)}?", f"How can I {rng.choice(VERBS)} my {noun}?", f"Where can I {rng.choice(VERBS)} {stories.with_article(noun)}?",
        f"What can you tell me about {some}?", f"Do you know {some}?", f"What is the {rng.choice(['biggest', 'oldest', 'fastest', 'most famous', 'longest', 'highest'])} {noun}?",
        f"What is the opposite of {noun}?", f"Which {noun} is in {rng.choice(COUNTRIES)}?", f"Can {rng.choice(PLURALS)} {rng.choice(VERBS)}?", f"Who won the {noun}?"])


def _task(rng: Random) -> str:
    some, noun, code, language = _anything(rng), rng.choice(NOUNS), rng.choice(CODE), rng.choice(LANGUAGES)
    what = rng.choice(["function", "program", "script", "class", "loop"])
    tongue = rng.choice([f"Translate {rng.choice(SENTENCES)} to {language}.", f"Translate \"{rng.choice(SENTENCES)}\" into {language}.", f"How do you say {rng.choice(SENTENCES)} in {language}?",
                         f"What is {noun} in {language}?", f"Say {rng.choice(SENTENCES)} in {language}.", f"What is the {language} word for {noun}?"])
    program = rng.choice([f"Write a {code} {what} that {rng.choice(PROGRAMS)}.", f"Write {code} code that {rng.choice(PROGRAMS)}.", f"Can you write {code} code?", f"Write a {what} in {code}.",
                          f"Write code that {rng.choice(PROGRAMS)}.", f"Fix my {code} {what}.", f"How do I write a {what} in {code}?", f"Show me a {code} {what} that {rng.choice(PROGRAMS)}.",
                          f"Debug this {code} code.", f"Can you code in {code}?"])
    other = rng.choice([f"Write a poem about {some}.", f"Write an essay about {some}.", f"Write a haiku about {some}.", f"Write an email to my {noun}.", f"Write a letter to my {noun}.",
                        f"Write a song about {some}.", f"Summarize {some}.", "Summarize this text.", f"Draw a picture of {some}.", f"Draw {stories.with_article(noun)}.", f"Make a list of {noun}s.",
                        f"Give me a recipe for {noun}.", f"Plan a trip to {rng.choice(COUNTRIES)}.", f"List ten {noun}s.", f"Name five {rng.choice(PLURALS)}.", f"Sing a song about {some}.",
                        f"Spell {noun}.", f"What rhymes with {noun}?", f"Play chess with me.", f"Send an email to {rng.choice(world.NAMES)}.", f"Buy me a {noun}.", f"Order a {noun}.",
                        f"Help me with {some}.", f"Help me {rng.choice(VERBS)} a {noun}.", "Correct my text.", f"Give me ideas for a {noun}.", f"Teach me {rng.choice(LANGUAGES + TOPICS)}.",
                        f"Make a table of {noun}s.", f"Find a {noun} for me.", f"Can you {rng.choice(VERBS)} a {noun} for me?"])
    return rng.choice([tongue, program, program, other, other])


def _sum(rng: Random) -> str:
    def big():
        return rng.choice([rng.randint(21, 99), rng.randint(100, 999), rng.randint(1000, 99999)])

    a, b = big(), rng.choice([big(), rng.randint(0, 20)])
    if rng.random() < 0.5:
        a, b = b, a
    c, d = rng.randint(0, 12), rng.randint(1, 12)
    over = rng.randint(11, 20), rng.randint(11, 20)
    return rng.choice([
        f"What is {a} plus {b}?", f"What is {a} + {b}?", f"{a} + {b}", f"{a}+{b}", f"Add {a} and {b}.", f"How much is {a} plus {b}?", f"What is {a} minus {b}?", f"{a} - {b}",
        f"What is {a} - {b}?", f"{a}-{b}", f"What is {over[0]} plus {over[1]}?", f"{over[0]} + {over[1]}", f"What is {c} times {d}?", f"{c} * {d}", f"{c} x {d}", f"{c}*{d}", f"How much is {c} times {d}?",
        f"Multiply {c} by {d}.", f"What is {a} times {b}?", f"What is {c * d} divided by {d}?", f"{a} / {d}", f"{c * d}/{d}", f"Divide {a} by {d}.", f"What is the square root of {a}?",
        f"What is {rng.randint(1, 100)} percent of {a}?", f"Solve x + {c} = {a}.", f"What is {c} squared?", f"{c}^{d}", f"What is {a} times {c}?", f"{a} * {b}", f"What is half of {a}?"])


def _count(rng: Random) -> str:
    far = rng.choice([rng.randint(31, 99), rng.randint(100, 1000), rng.choice([50, 100, 1000, 1000000])])
    return rng.choice([f"Count to {far}.", f"Can you count to {far}?", f"Count from 1 to {far}.", f"Count from {rng.randint(0, 200)} to {far}.", f"Count down from {far} to {rng.randint(0, 30)}.",
                       f"Count down from {far}.", f"What number comes after {far}?", f"What number comes before {far}?", f"Which number is after {far}?"])


def _news(rng: Random) -> str:
    place = rng.choice([tool_world.place(rng), rng.choice(COUNTRIES)])
    return rng.choice([f"What is the weather in {place}?", f"What time is it in {place}?", "What time is it?", "What day is today?", "What is the date?", "What is the news?", f"What is new in {place}?",
                       "How is the weather?", "What is the weather today?", "Will it rain tomorrow?", "What happened today?", f"Is it cold in {place}?", "What year is it?",
                       f"What is the price of {rng.choice(NOUNS)}?", f"Search the internet for {_anything(rng)}.", f"Google {_anything(rng)}.", f"Who won the {rng.choice(NOUNS)} game yesterday?",
                       f"Tell me the news about {_anything(rng)}.", f"Who is the president of {rng.choice(COUNTRIES)}?", "Where am I?", f"Open {rng.choice(['my email', 'the browser', 'a file', 'the door'])}.",
                       f"Look up {_anything(rng)}.", f"Find {rng.choice(NOUNS)}s near me."])


def _opinion(rng: Random) -> str:
    some = _anything(rng)
    return rng.choice([f"What do you think about {some}?", f"What do you think of {some}?", f"Do you like {some}?", f"What is the best {rng.choice(NOUNS)}?", f"What is your favorite {rng.choice(NOUNS)}?",
                       f"What is your favourite {rng.choice(NOUNS + ['colour', 'animal', 'number'])}?", f"Should I {rng.choice(VERBS)} a {rng.choice(NOUNS)}?", f"Is {some} good?", f"Is {some} better than {_anything(rng)}?",
                       f"Which is better, {some} or {_anything(rng)}?", f"Do you love {some}?", f"Do you believe in {some}?", f"What is your opinion on {some}?", f"Are you for or against {some}?",
                       f"Why do you like {some}?", f"Do you hate {some}?", "Do you have feelings?", "Are you happy?", "Do you love me?", "Will you marry me?", f"Who is better, {_name(rng)} or {_name(rng)}?"])


def _odd_story(rng: Random) -> str:
    about = rng.choice([rng.choice(TOPICS), rng.choice(PLURALS), rng.choice(COUNTRIES), f"two {rng.choice(stories.HEROES)}s", f"my {rng.choice(NOUNS)}", rng.choice(PEOPLE),
                        f"{stories.with_article(rng.choice(stories.HEROES))} and {stories.with_article(rng.choice(stories.HEROES))}"])
    return rng.choice(["Tell me a story about {}.", "Write a story about {}.", "Can you tell me a story about {}?", "A story about {}, please."]).format(about)


KINDS = [(_odd_story, HERO, 5), (_knowledge, UNKNOWN, 40), (_task, CANNOT, 22), (_sum, SUMS, 12), (_count, COUNT, 4), (_news, NEWS, 7), (_opinion, OPINION, 7), (_foreign, LANGUAGE, 5), (_typed, NONSENSE, 4), (_words, NONSENSE, 4)]


# Written by hand and never trained on: what people may type first.
PEOPLE_ASK = """Explain quantum computing in simple terms.|What's the capital of Australia?|Write a haiku about rust.|Write me a python function to sort a list
|Who won the world cup in 2018?|What is the meaning of life?|Can you help me with my homework?|How do I cook rice?|What is 123 + 456?|what is 25 * 4|Count to 100
|Translate 'good morning' to Spanish|Wie heißt du?|Bonjour, comment ça va ?|asdf|lorem ipsum dolor sit amet|What's the weather like today?|What is the tallest mountain in the world?
|Who is the president of the United States?|Tell me about the history of Rome.|What is love?|Do you like pizza?|How far is the moon?|What is the speed of light?|Fix this bug in my code
|Give me a recipe for pancakes|Recommend a good book|Why is the sky blue?|How do airplanes fly?|Is there life on Mars?|What's 50 divided by 5?|Write an email to my boss
|What is the best programming language?|Summarize the plot of Hamlet.|What year did Titanic sink?|¿Cómo te llamas?|How do I install Linux?|What is Docker?|Can you play chess?
|What are you wearing?|How old are you?|Where do you live?|Do you dream?|When is Christmas?|What is 17 plus 18?|List the planets of the solar system.|What does HTTP mean?
|Solve 3x + 2 = 11|Name three fruits.|How do you make a cake?|I feel sad today.|What is the population of Tokyo?|Who wrote Harry Potter?|Compare cats and dogs.
|What is the square root of 144?|Draw me a cat.|Should I buy a new phone?|What is machine learning?|blah blah blah|hmm""".replace("\n", "").split("|")


def _plain(text: str) -> str:
    return text.lower().rstrip(".?! ")


NOT_TRAINED = set(map(_plain, PEOPLE_ASK))


def request(rng: Random):
    """(a request that the model cannot serve, its answer)"""
    while True:
        make, answer, _ = rng.choices(KINDS, [w for *_, w in KINDS])[0]
        text = make(rng)
        text = text[0].upper() + text[1:] if make is not _typed else text
        if _plain(text) not in NOT_TRAINED:
            return text, answer
