"""Questions about the small world, each with the one answer that the tables of `world` give."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dice import Dice
from world import (
    BABIES,
    CAPITALS,
    COLOUR_OF,
    DAYS,
    GROUPS,
    HELLO_IN,
    KINDS,
    LEGS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    PLURALS,
    SEASONS,
    SIZES,
    USES,
)

# Subjects are drawn almost evenly: every fact of a table must be learnt.
SUBJECT_SKEW = 0.4


class Exchange(NamedTuple):
    question: str
    answer: str


def ask(dice: Dice) -> Exchange:
    return dice.pick(TOPICS, skew=0.3)(dice)


def _entry(dice: Dice, table: dict[str, str]) -> tuple[str, str]:
    return dice.pick(tuple(table.items()), skew=SUBJECT_SKEW)


def colour(dice: Dice) -> Exchange:
    thing, its_colour = _entry(dice, COLOUR_OF)
    question = dice.pick((f"What color is {thing}?", f"What colour is {thing}?", f"Tell me the color of {thing}."))
    return Exchange(question, f"{thing.capitalize()} is {its_colour}.")


def opposite(dice: Dice) -> Exchange:
    word, other = _entry(dice, OPPOSITES)
    if dice.chance(0.4):
        word, other = other, word
        if other == "black":
            word, other = "white", "black"
    return Exchange(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.")


def baby(dice: Dice) -> Exchange:
    parent, child = _entry(dice, BABIES)
    return Exchange(f"What is a baby {parent} called?", f"A baby {parent} is called a {child}.")


def plural(dice: Dice) -> Exchange:
    one, many = _entry(dice, PLURALS)
    return Exchange(f"What is the plural of {one}?", f"The plural of {one} is {many}.")


def capital(dice: Dice) -> Exchange:
    country, city = _entry(dice, CAPITALS)
    return Exchange(f"What is the capital of {country}?", f"The capital of {country} is {city}.")


def greeting_in(dice: Dice) -> Exchange:
    language, word = _entry(dice, HELLO_IN)
    question = dice.pick((f"How do you say hello in {language}?", f"What is hello in {language}?"))
    return Exchange(question, f'Hello in {language} is "{word}".')


def sound(dice: Dice) -> Exchange:
    kind = dice.pick(KINDS, skew=SUBJECT_SKEW)
    question = dice.pick((f"What does a {kind.noun} say?", f"What sound does a {kind.noun} make?"))
    return Exchange(question, f"A {kind.noun} says {kind.sound}.")


def home(dice: Dice) -> Exchange:
    kind = dice.pick(KINDS, skew=SUBJECT_SKEW)
    return Exchange(f"Where does a {kind.noun} live?", f"A {kind.noun} lives {kind.home}.")


def meal(dice: Dice) -> Exchange:
    kind = dice.pick(KINDS, skew=SUBJECT_SKEW)
    return Exchange(f"What does a {kind.noun} eat?", f"A {kind.noun} likes to eat {kind.food}.")


def emoji(dice: Dice) -> Exchange:
    kind = dice.pick(KINDS, skew=SUBJECT_SKEW)
    if dice.chance(0.4):
        return Exchange(f"What is {kind.emoji}?", f"{kind.emoji} is a {kind.noun}.")
    question = dice.pick((f"Show me a {kind.noun} emoji.", f"What is the emoji for a {kind.noun}?"))
    return Exchange(question, f"Here is a {kind.noun}: {kind.emoji}")


def legs(dice: Dice) -> Exchange:
    animal, count = dice.pick(tuple(LEGS.items()), skew=SUBJECT_SKEW)
    words = "no legs" if count == 0 else f"{NUMBER_WORDS[count]} legs"
    return Exchange(f"How many legs does {animal} have?", f"{animal.capitalize()} has {words}.")


def use(dice: Dice) -> Exchange:
    tool, deed = _entry(dice, USES)
    question = dice.pick((f"What do we use {tool} for?", f"What is {tool} for?"))
    return Exchange(question, f"We use {tool} to {deed}.")


def members(dice: Dice) -> Exchange:
    group, words = dice.pick(tuple(GROUPS.items()), skew=SUBJECT_SKEW)
    count = dice.pick((3, 2, 4, 5), skew=0.8)
    listed = ", ".join(words[: count - 1]) + f" and {words[count - 1]}"
    question = dice.pick((f"Name {NUMBER_WORDS[count]} {group}.", f"Tell me {NUMBER_WORDS[count]} {group}."))
    return Exchange(question, f"{NUMBER_WORDS[count].capitalize()} {group} are: {listed}.")


def size(dice: Dice) -> Exchange:
    first = dice.pick(SIZES, skew=SUBJECT_SKEW)
    second = dice.pick_other(SIZES, [first], skew=SUBJECT_SKEW)
    bigger = max(first, second, key=SIZES.index)
    smaller = min(first, second, key=SIZES.index)
    question = f"Which is bigger, {_article(first)} or {_article(second)}?"
    return Exchange(question, f"{_article(bigger).capitalize()} is bigger than {_article(smaller)}.")


def season(dice: Dice) -> Exchange:
    name, happening = _entry(dice, SEASONS)
    return Exchange(f"What happens in {name}?", f"In {name}, {happening}.")


def day(dice: Dice) -> Exchange:
    return _neighbour(dice, DAYS, "day")


def month(dice: Dice) -> Exchange:
    return _neighbour(dice, MONTHS, "month")


def addition(dice: Dice) -> Exchange:
    first, second = dice.number(0, 10), dice.number(0, 10)
    return _calculation(dice, first, "plus", second, first + second)


def subtraction(dice: Dice) -> Exchange:
    first = dice.number(0, 10)
    second = dice.number(0, first)
    return _calculation(dice, first, "minus", second, first - second)


def counting(dice: Dice) -> Exchange:
    last = dice.pick((10, 5, 3, 7, 12, 8, 20), skew=0.8)
    numbers = range(1, last + 1)
    if dice.chance(0.3):
        return Exchange(f"Count down from {last}.", ", ".join(str(number) for number in reversed(numbers)) + ".")
    return Exchange(f"Count to {last}.", ", ".join(str(number) for number in numbers) + ".")


def next_number(dice: Dice) -> Exchange:
    number = dice.number(0, 30)
    return Exchange(f"What number comes after {number}?", f"After {number} comes {number + 1}.")


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _neighbour(dice: Dice, cycle: tuple[str, ...], unit: str) -> Exchange:
    index = dice.number(0, len(cycle) - 1)
    here = cycle[index]
    if dice.chance(0.65):
        return Exchange(f"What {unit} comes after {here}?", f"After {here} comes {cycle[(index + 1) % len(cycle)]}.")
    return Exchange(f"What {unit} comes before {here}?", f"Before {here} comes {cycle[index - 1]}.")


def _calculation(dice: Dice, first: int, operation: str, second: int, result: int) -> Exchange:
    sign = {"plus": "+", "minus": "-"}[operation]
    question = dice.pick((f"What is {first} {operation} {second}?", f"What is {first} {sign} {second}?"))
    return Exchange(question, f"{first} {operation} {second} is {result}.")


TOPICS: tuple[Callable[[Dice], Exchange], ...] = (
    addition,
    colour,
    opposite,
    capital,
    sound,
    day,
    greeting_in,
    members,
    emoji,
    baby,
    size,
    counting,
    home,
    meal,
    month,
    use,
    subtraction,
    plural,
    legs,
    season,
    next_number,
)
