"""Short stories with named heroes, consistent references and questions that the story itself answers.

A plot is a function from a cast to the story's middle; opening and ending are common to all. Knows nothing of chats,
tokens or special marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dice import Dice
from world import (
    ADJECTIVES,
    BUILDINGS,
    COLOURS,
    GAMES,
    GOODS,
    HE,
    HIDING_PLACES,
    HOBBIES,
    KINDS,
    MATERIALS,
    NUMBER_WORDS,
    OUTINGS,
    PEOPLE,
    PLANTS,
    SHE,
    SKILLS,
    THINGS,
    WEATHER,
    Kind,
    Name,
)


@dataclass(frozen=True)
class Character:
    kind: Kind
    name: Name

    @property
    def full_name(self) -> str:
        return f"{self.name.text} the {self.kind.noun}"


@dataclass(frozen=True)
class Cast:
    hero: Character
    friend: Character


@dataclass(frozen=True)
class Scene:
    """The middle of a story, in order, and what may be asked about it."""

    sentences: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Story:
    text: str
    hero: Character
    questions: tuple[tuple[str, str], ...]


def tell_story(dice: Dice, kind: Kind | None = None) -> Story:
    """A whole story; `kind` fixes what the hero is."""
    hero = draw_character(dice, kind or dice.pick(KINDS + PEOPLE, skew=0.9))
    friend = draw_friend(dice, hero)
    cast = Cast(hero, friend)
    scene = dice.pick(PLOTS, key=hero.kind.noun, skew=1.2)(dice, cast)
    paragraphs = (" ".join(_opening(dice, hero)), " ".join(scene.sentences), _ending(dice, cast))
    about = (
        ("Who is the story about?", f"The story is about {_article(hero.kind.noun)} named {hero.name.text}."),
        (f"Where did {hero.name.text} live?", f"{hero.name.text} lived {hero.kind.home}."),
        (f"Who was the friend of {hero.name.text}?", f"The friend of {hero.name.text} was {friend.full_name}."),
    )
    return Story("\n\n".join(paragraphs), hero, scene.questions + about)


def draw_character(dice: Dice, kind: Kind) -> Character:
    if kind.noun in ("girl", "boy"):
        return Character(kind, dice.pick(SHE if kind.noun == "girl" else HE, key=kind.noun))
    return Character(kind, dice.pick(SHE[:4] + HE[:4] + SHE[4:] + HE[4:], key=kind.noun))


def draw_friend(dice: Dice, hero: Character) -> Character:
    kind = dice.pick_other(KINDS, [hero.kind], key=hero.kind.noun)
    name = dice.pick_other(HE + SHE, [hero.name], key=hero.name.text + kind.noun)
    return Character(kind, name)


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _opening(dice: Dice, hero: Character) -> list[str]:
    name, (kind, home) = hero.name, hero.kind[:2]
    adjective = dice.pick(ADJECTIVES, key=kind)
    described = _article(f"{adjective} {kind}")
    subject = name.he.capitalize()
    first = dice.pick(
        (
            f"Once upon a time, there was {described} named {name.text}. {subject} lived {home}.",
            f"Once upon a time there was {described} named {name.text}. {subject} lived {home}.",
            f"There was once {described} who lived {home}. {name.his.capitalize()} name was {name.text}.",
            f"Long ago, {described} named {name.text} lived {home}.",
            f"{name.text} was {described}. {subject} lived {home}.",
            f"The {adjective} {kind} was named {name.text}. {subject} lived {home}.",
            f"One day, {described} named {name.text} woke up very early. {subject} lived {home}.",
        ),
        skew=1.2,
    )
    like = dice.pick(
        (
            f"{name.text} loved {dice.pick(HOBBIES, key=name.text)}.",
            f"{subject} loved {dice.pick(HOBBIES, key=kind)}.",
            f"{name.text} liked to eat {hero.kind.food}.",
            f"Every morning, {name.he} ate {hero.kind.food} for breakfast.",
        ),
        key=kind,
    )
    return [first, like]


def _ending(dice: Dice, cast: Cast) -> str:
    hero, friend = cast.hero.name, cast.friend.name
    last = dice.pick(
        (
            f"From that day on, {hero.text} and {friend.text} were the best of friends.",
            f"{hero.text} went home and slept very well that night.",
            f"They laughed and played {dice.pick(GAMES, key=hero.text)} until the sun went down.",
            f"{hero.text} smiled, because it had been a very good day.",
            "And they lived happily ever after.",
        ),
        key=cast.hero.kind.noun,
    )
    return last + dice.pick((" The end.", ""))


def _day(dice: Dice, cast: Cast) -> str:
    return f"One {dice.pick(WEATHER, key=cast.hero.kind.noun)} {dice.pick(('day', 'morning', 'afternoon'))}"


def lost_thing(dice: Dice, cast: Cast) -> Scene:
    hero, friend, he, his = cast.hero.name.text, cast.friend, cast.hero.name.he, cast.hero.name.his
    thing = dice.pick(THINGS, key=hero)
    colour = dice.pick((thing.colour, dice.pick(COLOURS, key=thing.noun)))
    wrong = dice.pick(HIDING_PLACES, key=thing.noun)
    right = dice.pick_other(HIDING_PLACES, [wrong], key=colour)
    reply = dice.pick(("I will help you", "Let us look for it together", "Do not cry, we will find it"), key=colour)
    sentences = (
        f"{_day(dice, cast)}, {hero} could not find {his} {colour} {thing.noun}.",
        f"{he.capitalize()} looked {wrong}, but it was not there. {hero} felt very sad.",
        f'Then {friend.full_name} came by. "Why are you sad?" asked {friend.name.text}.',
        f'"I lost my {colour} {thing.noun}," said {hero}. "{reply}," said {friend.name.text}.',
        f"They looked everywhere. At last they saw something {colour} {right}. It was the {thing.noun}!",
        f'"Thank you, {friend.name.text}," said {hero}. "You are a good friend."',
    )
    questions = (
        (f"What did {hero} lose?", f"{hero} lost {his} {colour} {thing.noun}."),
        (f"Where was the {thing.noun}?", f"The {thing.noun} was {right}."),
        (f"Who helped {hero}?", f"{friend.full_name} helped {hero}."),
        (f"What color was the {thing.noun}?", f"The {thing.noun} was {colour}."),
    )
    return Scene(sentences, questions)


def shared_food(dice: Dice, cast: Cast) -> Scene:
    hero, friend = cast.hero.name.text, cast.friend
    food, place = cast.hero.kind.food, dice.pick(HIDING_PLACES, key=cast.hero.kind.food)
    share = dice.pick(("half of the", "some of the", "most of the"), key=food)
    sentences = (
        f"{_day(dice, cast)}, {hero} found a big basket full of {food} {place}.",
        f"{hero} was very hungry and sat down to eat.",
        f"Just then {friend.full_name} walked by and looked very tired.",
        f'"I have not eaten all day," said {friend.name.text}.',
        f"{hero} thought for a moment. Then {cast.hero.name.he} gave {friend.name.text} {share} {food}.",
        f'"You are very kind," said {friend.name.text}. They ate together and told each other funny stories.',
    )
    questions = (
        (f"What did {hero} find?", f"{hero} found a big basket full of {food}."),
        ("Who was hungry and tired?", f"{friend.full_name} was hungry and tired."),
        (f"What did {hero} give to {friend.name.text}?", f"{hero} gave {friend.name.text} {share} {food}."),
        ("Where was the basket?", f"The basket was {place}."),
    )
    return Scene(sentences, questions)


def big_storm(dice: Dice, cast: Cast) -> Scene:
    hero, friend, he = cast.hero.name.text, cast.friend, cast.hero.name.he
    outing, hobby = dice.pick(OUTINGS, key=hero), dice.pick(("sang a song", "told a story", "held hands"), key=hero)
    sentences = (
        f"{_day(dice, cast)}, {hero} went {outing}.",
        f"Suddenly the sky turned dark and a big storm began. {hero} was afraid of the loud thunder.",
        f"{he.capitalize()} ran to the house of {friend.full_name} and knocked on the door.",
        f'"Come in, come in," said {friend.name.text}. "You are safe here."',
        f"They sat by the fire and {hobby} until the storm was over.",
        f"When {hero} looked outside, there was a rainbow in the sky.",
    )
    questions = (
        (f"Where did {hero} go?", f"{hero} went {outing}."),
        (f"What was {hero} afraid of?", f"{hero} was afraid of the loud thunder."),
        ("What did they see in the sky?", "They saw a rainbow in the sky."),
        (f"Who said that {hero} was safe?", f"{friend.full_name} said that {hero} was safe."),
    )
    return Scene(sentences, questions)


def built_thing(dice: Dice, cast: Cast) -> Scene:
    hero, friend, he = cast.hero.name.text, cast.friend, cast.hero.name.he
    building = dice.pick(BUILDINGS, key=cast.hero.kind.noun)
    first = dice.pick(MATERIALS, key=building)
    second = dice.pick_other(MATERIALS, [first], key=building)
    days = NUMBER_WORDS[dice.pick((3, 2, 5, 4), key=building)]
    sentences = (
        f"{_day(dice, cast)}, {hero} wanted to build {building}.",
        f"{he.capitalize()} took some {first} and began to work, but it was too hard to do alone.",
        f"So {he} asked {friend.full_name} for help. {friend.name.text} came and brought {second}.",
        f"They worked for {days} days. {hero} used the {first} and {friend.name.text} used the {second}.",
        f'"Look what we made!" said {hero}. "It is the best one I have ever seen," said {friend.name.text}.',
    )
    questions = (
        (f"What did {hero} want to build?", f"{hero} wanted to build {building}."),
        (f"What did {friend.name.text} bring?", f"{friend.name.text} brought {second}."),
        ("How long did they work?", f"They worked for {days} days."),
        (f"Who helped {hero}?", f"{friend.full_name} helped {hero}."),
    )
    return Scene(sentences, questions)


def race(dice: Dice, cast: Cast) -> Scene:
    hero, friend = cast.hero.name.text, cast.friend
    outing = dice.pick(OUTINGS, key=cast.hero.kind.noun)
    winner, loser = (cast.hero, friend) if dice.chance(0.75) else (friend, cast.hero)
    sentences = (
        f"{_day(dice, cast)}, {friend.full_name} came to visit.",
        f'"Let us have a race {outing}," said {friend.name.text}. "Ready, steady, go!" shouted {hero}.',
        f"They ran as fast as they could. {loser.name.text} stopped to rest under a tree.",
        f"But {winner.name.text} did not stop. {winner.name.he.capitalize()} went on and on and won the race.",
        f'"Well done!" said {loser.name.text}. "Next time I will not stop to rest."',
    )
    questions = (
        ("Who won the race?", f"{winner.name.text} won the race."),
        ("Who stopped to rest?", f"{loser.name.text} stopped to rest under a tree."),
        ("Where did they run?", f"They ran {outing}."),
    )
    return Scene(sentences, questions)


def birthday(dice: Dice, cast: Cast) -> Scene:
    hero, friend = cast.hero.name.text, cast.friend
    thing = dice.pick(THINGS, key=cast.friend.kind.noun)
    colour = dice.pick((thing.colour, dice.pick(COLOURS, key=thing.noun)))
    guests = NUMBER_WORDS[dice.pick((5, 3, 7, 4, 6), key=thing.noun)]
    sentences = (
        f"{_day(dice, cast)}, it was the birthday of {friend.full_name}.",
        f"{hero} wanted to give {cast.friend.name.him} a present. {hero} made a {colour} {thing.noun}.",
        f"There was a big party with {guests} guests, and everybody ate cake and sang.",
        f"{friend.name.text} opened the box and saw the {colour} {thing.noun}.",
        f'"This is just what I wanted!" said {friend.name.text} and gave {hero} a big hug.',
    )
    questions = (
        ("Whose birthday was it?", f"It was the birthday of {friend.full_name}."),
        ("What was the present?", f"The present was a {colour} {thing.noun}."),
        ("How many guests were there?", f"There were {guests} guests."),
        ("What did everybody eat?", "Everybody ate cake."),
    )
    return Scene(sentences, questions)


def new_skill(dice: Dice, cast: Cast) -> Scene:
    hero, friend, he = cast.hero.name.text, cast.friend, cast.hero.name.he
    skill = dice.pick(SKILLS, key=cast.hero.kind.noun)
    advice = dice.pick(("Try once more", "Go slowly", "Do not give up", "Believe in yourself"), key=skill)
    sentences = (
        f"{_day(dice, cast)}, {hero} wanted to learn how to {skill}.",
        f"{he.capitalize()} tried once, but it did not work. {he.capitalize()} tried twice, but it did not work.",
        f'{hero} wanted to give up. "{advice}," said {friend.full_name}.',
        f"So {hero} took a deep breath and tried again. This time it worked!",
        f'"I can {skill}!" shouted {hero}. {friend.name.text} clapped and was very proud.',
    )
    questions = (
        (f"What did {hero} want to learn?", f"{hero} wanted to learn how to {skill}."),
        (f"What did {friend.name.text} say?", f'{friend.name.text} said, "{advice}."'),
        (f"Who was proud of {hero}?", f"{friend.full_name} was proud of {hero}."),
    )
    return Scene(sentences, questions)


def garden(dice: Dice, cast: Cast) -> Scene:
    hero, friend, he = cast.hero.name.text, cast.friend, cast.hero.name.he
    plant = dice.pick(PLANTS, key=cast.hero.kind.noun)
    weeks = NUMBER_WORDS[dice.pick((3, 2, 6, 4), key=plant)]
    sentences = (
        f"{_day(dice, cast)}, {hero} planted a small seed in the ground.",
        f"{he.capitalize()} gave it water every day and waited. Nothing happened for {weeks} weeks.",
        f'"It will never grow," said {hero}. "You must be patient," said {friend.full_name}.',
        "The next morning, a tiny green leaf came out of the ground.",
        f"It grew and grew until it was {_article(plant)}. {hero} and {friend.name.text} danced with joy.",
    )
    questions = (
        (f"What did {hero} plant?", f"{hero} planted a small seed."),
        ("What did the seed become?", f"The seed became {_article(plant)}."),
        ("How long did nothing happen?", f"Nothing happened for {weeks} weeks."),
        ("Who said to be patient?", f"{friend.full_name} said to be patient."),
    )
    return Scene(sentences, questions)


def market(dice: Dice, cast: Cast) -> Scene:
    hero, friend, he = cast.hero.name.text, cast.friend, cast.hero.name.he
    goods = dice.pick(GOODS, key=cast.hero.kind.noun)
    bought, given = dice.pick((5, 4, 6, 8, 7), key=goods), dice.pick((2, 1, 3), key=goods)
    left = NUMBER_WORDS[bought - given]
    sentences = (
        f"{_day(dice, cast)}, {hero} went to the market and bought {NUMBER_WORDS[bought]} {goods}.",
        f"On the way home, {he} met {friend.full_name}.",
        f'"What nice {goods} you have," said {friend.name.text}. "May I have some?"',
        f'"Of course," said {hero} and gave {friend.name.him} {NUMBER_WORDS[given]}.',
        f"Now {hero} had {left} {goods} left, but {he} was happy to have made a new friend.",
    )
    questions = (
        (f"What did {hero} buy?", f"{hero} bought {NUMBER_WORDS[bought]} {goods}."),
        (f"Who did {hero} meet?", f"{hero} met {friend.full_name}."),
        (f"How many {goods} were left?", f"There were {left} {goods} left."),
    )
    return Scene(sentences, questions)


PLOTS: tuple[Callable[[Dice, Cast], Scene], ...] = (
    lost_thing,
    shared_food,
    big_storm,
    built_thing,
    race,
    birthday,
    new_skill,
    garden,
    market,
)
