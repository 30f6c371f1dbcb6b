"""The small closed world the model can talk about: tables of facts, nothing else."""

COLOURS = {
    "banana": "yellow", "lemon": "yellow", "sunflower": "yellow", "canary": "yellow", "tomato": "red", "cherry": "red",
    "strawberry": "red", "fire engine": "red", "rose": "red", "carrot": "orange", "pumpkin": "orange", "frog": "green",
    "cucumber": "green", "pea": "green", "leaf": "green", "lime": "green", "crocodile": "green", "blueberry": "blue",
    "sapphire": "blue", "plum": "purple", "grape": "purple", "aubergine": "purple", "flamingo": "pink", "pig": "pink",
    "crow": "black", "tyre": "black", "polar bear": "white", "swan": "white", "snowman": "white", "elephant": "grey",
    "chestnut": "brown", "football": "white", "emerald": "green", "ruby": "red",
}
MASS_COLOURS = {"the sky": "blue", "the sea": "blue", "grass": "green", "snow": "white", "milk": "white", "coal": "black",
                "blood": "red", "chocolate": "brown", "the sun": "yellow", "gold": "yellow", "the night": "black",
                "fire": "orange", "salt": "white", "honey": "yellow", "ink": "blue"}
COLOUR_NAMES = "red orange yellow green blue purple pink black white grey brown".split()

# Smallest first.
SIZES = """ant ladybird bee spider frog mouse rat squirrel rabbit cat fox dog goat sheep wolf pig deer lion bear cow
horse hippo elephant whale""".split()

SOUNDS = {"dog": "barks", "cat": "meows", "cow": "moos", "sheep": "bleats", "pig": "oinks", "horse": "neighs",
          "duck": "quacks", "lion": "roars", "wolf": "howls", "bee": "buzzes", "snake": "hisses", "owl": "hoots",
          "frog": "croaks", "mouse": "squeaks", "hen": "clucks", "donkey": "brays", "bird": "sings", "crow": "caws",
          "bear": "growls", "elephant": "trumpets"}
HABITATS = {"fish": "in the water", "whale": "in the ocean", "bear": "in the forest", "camel": "in the desert",
            "penguin": "on the ice", "frog": "in a pond", "bee": "in a hive", "bird": "in a nest", "lion": "on the savanna",
            "monkey": "in the jungle", "cow": "on a farm", "mole": "under the ground", "eagle": "in the mountains",
            "crab": "on the beach", "spider": "in a web", "polar bear": "in the Arctic", "kangaroo": "in Australia",
            "panda": "in China", "dog": "in a house", "fox": "in a den"}
BABIES = {"dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "pig": "piglet", "goat": "kid",
          "bear": "cub", "duck": "duckling", "frog": "tadpole", "hen": "chick", "kangaroo": "joey", "deer": "fawn",
          "swan": "cygnet", "owl": "owlet"}
LEGS = {"dog": "four", "cat": "four", "horse": "four", "cow": "four", "bird": "two", "spider": "eight", "ant": "six",
        "bee": "six", "snake": "no", "fish": "no", "hen": "two", "crab": "ten", "butterfly": "six", "mouse": "four",
        "penguin": "two", "elephant": "four", "worm": "no"}
FOODS = {"rabbit": "carrots", "monkey": "bananas", "mouse": "cheese", "cow": "grass", "panda": "bamboo", "bear": "honey",
         "squirrel": "nuts", "cat": "fish", "dog": "bones", "horse": "hay", "lion": "meat", "koala": "leaves",
         "bird": "seeds", "frog": "flies", "sheep": "grass"}
OPPOSITES = [("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("up", "down"), ("left", "right"),
             ("day", "night"), ("black", "white"), ("happy", "sad"), ("old", "young"), ("open", "closed"), ("full", "empty"),
             ("hard", "soft"), ("wet", "dry"), ("light", "dark"), ("loud", "quiet"), ("rich", "poor"), ("strong", "weak"),
             ("thick", "thin"), ("early", "late"), ("good", "bad"), ("near", "far"), ("high", "low"), ("begin", "end"),
             ("clean", "dirty"), ("true", "false"), ("yes", "no"), ("win", "lose"), ("buy", "sell"),
             ("push", "pull"), ("love", "hate"), ("inside", "outside"), ("awake", "asleep"), ("sweet", "sour"), ("wide", "narrow")]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "England": "London",
            "Ireland": "Dublin", "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Sweden": "Stockholm",
            "Norway": "Oslo", "Finland": "Helsinki", "Denmark": "Copenhagen", "Russia": "Moscow", "Japan": "Tokyo",
            "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Canada": "Ottawa", "Brazil": "Brasilia",
            "Hungary": "Budapest", "Belgium": "Brussels", "the United States": "Washington"}
KINDS = {"fruit": "apple banana cherry pear plum lemon grape strawberry".split(),
         "animal": "dog cat horse cow fox lion mouse whale".split(),
         "vegetable": "carrot potato cucumber onion cabbage".split(),
         "colour": "red blue green yellow".split(),
         "tool": "hammer saw spade drill".split(),
         "instrument": "piano drum flute violin guitar".split()}
PLURALS = {"fox": "foxes", "dog": "dogs", "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth",
           "man": "men", "woman": "women", "goose": "geese", "cat": "cats", "box": "boxes", "city": "cities",
           "leaf": "leaves", "sheep": "sheep", "knife": "knives", "baby": "babies", "house": "houses", "wolf": "wolves",
           "book": "books", "bus": "buses", "story": "stories", "fish": "fish"}
JOKES = [
    "Why did the chicken cross the road? To get to the other side!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why is six afraid of seven? Because seven eight nine!",
    "What do you call a sleeping dinosaur? A dino-snore!",
    "Why did the bicycle fall over? Because it was two tired!",
    "What has hands but cannot clap? A clock!",
]
POEM_ENDS = [("The {x} woke up with the morning sun,", "and danced in the grass and had some fun.",
              "When evening came and the day was done,", "the {x} was glad for everyone."),
             ("I saw a {x} beside the sea,", "it looked around and smiled at me.",
              "It sang a song beneath a tree,", "as happy as a {x} can be."),
             ("Little {x}, so soft and light,", "the moon is up, the stars are bright.",
              "Close your eyes and sleep all night,", "little {x}, sleep tight, sleep tight."),
             ("The {x} went out to see the town,", "it wore a coat and a golden crown.",
              "It walked the hill both up and down,", "and never, never wore a frown.")]
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
CITIES = "Paris Berlin London Rome Madrid Tokyo Oslo Vienna Boston Chicago Dublin Lisbon Athens Moscow Sydney Cairo Prague Zurich Geneva Seattle".split()
