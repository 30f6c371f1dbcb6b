"""The small closed world the model can talk about: tables of facts, nothing else."""

COLOURS = {
    "banana": "yellow", "lemon": "yellow", "sunflower": "yellow", "tomato": "red", "cherry": "red", "strawberry": "red",
    "carrot": "orange", "pumpkin": "orange", "frog": "green", "cucumber": "green", "leaf": "green", "blueberry": "blue",
    "plum": "purple", "pig": "pink", "crow": "black", "swan": "white", "elephant": "grey", "chestnut": "brown",
}
MASS_COLOURS = {"the sky": "blue", "the sea": "blue", "grass": "green", "snow": "white", "milk": "white", "coal": "black",
                "the sun": "yellow", "chocolate": "brown"}
# Smallest first.
SIZES = "ant mouse rabbit cat dog pig horse elephant".split()

SOUNDS = {"dog": "barks", "cat": "meows", "cow": "moos", "pig": "oinks", "duck": "quacks", "lion": "roars", "wolf": "howls",
          "bee": "buzzes", "owl": "hoots", "frog": "croaks", "mouse": "squeaks", "bird": "sings"}
HABITATS = {"fish": "in the water", "whale": "in the ocean", "bear": "in the forest", "camel": "in the desert",
            "penguin": "on the ice", "frog": "in a pond", "bee": "in a hive", "bird": "in a nest", "monkey": "in the jungle",
            "cow": "on a farm", "fox": "in a den"}
BABIES = {"dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "pig": "piglet", "bear": "cub",
          "duck": "duckling"}
LEGS = {"dog": "four", "cat": "four", "horse": "four", "cow": "four", "bird": "two", "duck": "two", "spider": "eight",
        "ant": "six", "bee": "six", "snake": "no", "fish": "no"}
FOODS = {"rabbit": "carrots", "monkey": "bananas", "mouse": "cheese", "cow": "grass", "bear": "honey", "squirrel": "nuts",
         "cat": "fish", "horse": "hay", "lion": "meat", "bird": "seeds"}
OPPOSITES = [("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("up", "down"), ("left", "right"),
             ("day", "night"), ("black", "white"), ("happy", "sad"), ("old", "young"), ("open", "closed"), ("full", "empty"),
             ("hard", "soft"), ("wet", "dry"), ("loud", "quiet"), ("strong", "weak")]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London", "Ireland": "Dublin",
            "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Norway": "Oslo", "Japan": "Tokyo", "Egypt": "Cairo"}
CITIES = """Paris Berlin London Rome Madrid Tokyo Oslo Vienna Dublin Athens Warsaw Cairo Lisbon Boston Chicago Sydney Prague
Zurich Amsterdam Munich Seattle Toronto Moscow Geneva""".split()
NAMES = """Tom Ben Max Leo Sam Finn Oscar Felix Jack Paul Anna Lily Mia Rosa Ella Nora Clara Ruby Luna Emma John Peter David
Michael James Thomas Daniel Robert Alex Martin Mary Sarah Laura Julia Alice Sophie Maria Lisa Kate Eva""".split()
