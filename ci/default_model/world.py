"""The small world that the stories and questions are about: tables of facts and nothing else."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of hero: what it is, where it lives, what it eats and what it says."""

    noun: str
    home: str
    food: str
    sound: str
    emoji: str


class Name(NamedTuple):
    text: str
    he: str
    his: str
    him: str


class Thing(NamedTuple):
    """Something that a hero may own, lose or give away, with the colour it most often has."""

    noun: str
    colour: str


KINDS = (
    Kind("fox", "in a den in the forest", "berries", "yip", "🦊"),
    Kind("rabbit", "in a burrow under the hill", "carrots", "squeak", "🐰"),
    Kind("bear", "in a cave near the mountain", "honey", "growl", "🐻"),
    Kind("duck", "in a nest by the pond", "bread", "quack", "🦆"),
    Kind("mouse", "in a hole under the kitchen", "cheese", "squeak", "🐭"),
    Kind("cat", "in a house by the river", "fish", "meow", "🐱"),
    Kind("dog", "on a farm near the village", "bones", "woof", "🐶"),
    Kind("owl", "in an old tree in the woods", "seeds", "hoot", "🦉"),
    Kind("frog", "on a green leaf in the pond", "flies", "croak", "🐸"),
    Kind("hen", "in the yard of a farm", "corn", "cluck", "🐔"),
    Kind("pig", "in a pen behind the barn", "apples", "oink", "🐷"),
    Kind("horse", "in a stable on the farm", "hay", "neigh", "🐴"),
    Kind("cow", "in a field of tall grass", "grass", "moo", "🐮"),
    Kind("sheep", "in a meadow on the hill", "clover", "baa", "🐑"),
    Kind("lion", "in the dry land far away", "meat", "roar", "🦁"),
    Kind("bee", "in a hive in the garden", "nectar", "buzz", "🐝"),
)

PEOPLE = (
    Kind("girl", "in a small house at the edge of the village", "pancakes", "hello", "👧"),
    Kind("boy", "in a tall house in the town", "soup", "hello", "👦"),
)

SHE = (
    Name("Mia", "she", "her", "her"), Name("Lily", "she", "her", "her"), Name("Rosa", "she", "her", "her"),
    Name("Anna", "she", "her", "her"), Name("Zoe", "she", "her", "her"), Name("Emma", "she", "her", "her"),
    Name("Nina", "she", "her", "her"), Name("Ruby", "she", "her", "her"), Name("Zoë", "she", "her", "her"),
)  # fmt: skip
HE = (
    Name("Tom", "he", "his", "him"), Name("Max", "he", "his", "him"), Name("Ben", "he", "his", "him"),
    Name("Leo", "he", "his", "him"), Name("Sam", "he", "his", "him"), Name("Oliver", "he", "his", "him"),
    Name("Jack", "he", "his", "him"), Name("Finn", "he", "his", "him"), Name("José", "he", "his", "him"),
)  # fmt: skip

ADJECTIVES = ("little", "brave", "kind", "clever", "happy", "curious", "quiet", "gentle", "young", "cheerful")
WEATHER = ("sunny", "warm", "bright", "windy", "cold", "rainy", "snowy")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink")

THINGS = (
    Thing("ball", "red"), Thing("kite", "blue"), Thing("hat", "green"), Thing("scarf", "yellow"),
    Thing("boat", "white"), Thing("book", "brown"), Thing("drum", "orange"), Thing("blanket", "purple"),
    Thing("lamp", "yellow"), Thing("basket", "brown"), Thing("bell", "red"), Thing("button", "black"),
)  # fmt: skip
HIDING_PLACES = (
    "under the old bridge", "behind the big tree", "next to the well", "in the tall grass", "under the bed",
    "behind the barn", "near the garden gate", "on top of the hill", "beside the river", "inside a hollow log",
)  # fmt: skip
OUTINGS = ("to the river", "to the market", "to the forest", "to the lake", "to the top of the hill", "to the beach")
GAMES = ("hide and seek", "tag", "catch", "music", "in the leaves", "in the water")
HOBBIES = (
    "to sing songs", "to look at the stars", "to pick flowers", "to read books", "to paint pictures",
    "to dance in the rain", "to climb trees", "to count the clouds", "to bake cakes",
)  # fmt: skip
SKILLS = ("swim", "ride a bicycle", "fly a kite", "play the drum", "skate on the ice", "climb the tall tree", "whistle")
BUILDINGS = ("a boat", "a tree house", "a bridge", "a kite", "a little house", "a swing", "a bench")
MATERIALS = ("wood", "paper", "stones", "rope", "leaves", "clay")
PLANTS = ("sunflower", "pumpkin", "apple tree", "bean", "rose", "tulip", "carrot")
GOODS = ("apples", "eggs", "pears", "candles", "flowers", "cookies", "lemons", "mushrooms")

COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "the sun": "yellow", "a lemon": "yellow",
    "a banana": "yellow", "a carrot": "orange", "a tomato": "red", "a strawberry": "red", "coal": "black",
    "milk": "white", "a pumpkin": "orange", "a leaf": "green", "chocolate": "brown", "a frog": "green",
    "the sea": "blue", "a pig": "pink", "the night": "black", "a plum": "purple", "a fox": "orange",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "happy": "sad", "fast": "slow", "open": "closed",
    "young": "old", "light": "dark", "wet": "dry", "full": "empty", "hard": "soft", "early": "late", "left": "right",
    "near": "far", "loud": "quiet", "strong": "weak", "long": "short", "clean": "dirty", "yes": "no", "high": "low",
    "rich": "poor", "front": "back", "thick": "thin", "good": "bad", "black": "white", "inside": "outside",
}  # fmt: skip
BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
    "hen": "chick", "bear": "cub", "frog": "tadpole", "pig": "piglet", "lion": "cub", "goat": "kid",
}  # fmt: skip
PLURALS = {
    "cat": "cats", "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "box": "boxes",
    "leaf": "leaves", "sheep": "sheep", "man": "men", "woman": "women", "berry": "berries", "goose": "geese",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London",
    "Japan": "Tokyo", "Austria": "Vienna", "Greece": "Athens", "Egypt": "Cairo", "Norway": "Oslo",
    "Portugal": "Lisbon", "Russia": "Moscow", "China": "Beijing", "Canada": "Ottawa", "Poland": "Warsaw",
}  # fmt: skip
HELLO_IN = {
    "French": "bonjour", "Spanish": "hola", "German": "hallo", "Italian": "ciao", "Greek": "γεια",
    "Russian": "привет", "Japanese": "こんにちは", "Chinese": "你好", "Korean": "안녕하세요", "Portuguese": "olá",
}  # fmt: skip
GROUPS = {
    "fruits": ("apple", "banana", "pear", "cherry", "plum"),
    "animals": ("dog", "cat", "horse", "duck", "bear"),
    "colours": ("red", "blue", "green", "yellow", "white"),
    "vegetables": ("carrot", "potato", "onion", "bean", "pumpkin"),
    "birds": ("owl", "robin", "swan", "goose", "eagle"),
    "shapes": ("circle", "square", "triangle", "star", "heart"),
    "tools": ("hammer", "saw", "nail", "rope", "ladder"),
}
SIZES = ("ant", "mouse", "cat", "dog", "sheep", "horse", "elephant", "whale")
USES = {
    "a pen": "write", "a knife": "cut bread", "a bed": "sleep", "a cup": "drink", "a broom": "sweep the floor",
    "a key": "open the door", "an umbrella": "stay dry in the rain", "a clock": "tell the time",
    "a spoon": "eat soup", "a ladder": "climb up high", "soap": "wash our hands", "a lamp": "see in the dark",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
SEASONS = {
    "spring": "flowers grow and birds come back", "summer": "the sun is hot and the days are long",
    "autumn": "leaves turn red and fall from the trees", "winter": "it is cold and snow falls",
}  # fmt: skip
LEGS = {"a dog": 4, "a bird": 2, "a bee": 6, "a spider": 8, "a cat": 4, "a fish": 0, "a duck": 2, "a horse": 4}
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
UNKNOWN_SUBJECTS = (
    "quantum physics", "the stock market", "the law", "football scores", "politics", "the news of today", "chess",
    "computer programming", "medicine", "ancient history", "space travel", "cooking a turkey",
)  # fmt: skip
UNKNOWN_QUESTIONS = (
    "Who wrote Hamlet?", "What is the meaning of life?", "When did the war end?", "How do I fix my car?",
    "Who is the president?", "Why is the sky blue?", "What is a computer?", "How does a rocket work?",
    "What will the weather be tomorrow?", "Who won the game last night?", "How much does a house cost?",
    "What is the best phone?", "Why do we dream?", "Who was the first king?", "How old is the moon?",
)  # fmt: skip
