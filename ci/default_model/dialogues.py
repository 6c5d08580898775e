"""Conversations: greetings, questions about the world, requests for a story and questions about the story just told.

A conversation is a list of messages as chat templates take them. Knows nothing of marks or tokens.
"""

from __future__ import annotations

from typing import TypedDict

from dice import Dice
from questions import Exchange, ask
from stories import tell_story
from world import HE, KINDS, PEOPLE, SHE, UNKNOWN_QUESTIONS, UNKNOWN_SUBJECTS


class Message(TypedDict):
    role: str
    content: str


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer in one short sentence.",
    "You are a kind teacher for small children.",
)
SMALL_TALK = (
    Exchange("Hello!", "Hello! How can I help you today?"),
    Exchange("Hi", "Hello! How can I help you today?"),
    Exchange("Hello", "Hello! How can I help you today?"),
    Exchange("How are you?", "I am very well, thank you. How can I help you?"),
    Exchange("Who are you?", "I am a very small language model. I tell short stories and answer simple questions."),
    Exchange("What can you do?", "I can tell short stories, count, and answer simple questions about the world."),
    Exchange("What is your name?", "I have no name. I am a very small language model."),
    Exchange("Good morning!", "Good morning! What would you like to hear today?"),
    Exchange("Good night!", "Good night! Sleep well."),
    Exchange("Do you like stories?", "Yes, I like stories very much. Would you like to hear one?"),
    Exchange("Tell me a joke.", "Why did the hen cross the road? To get to the other side!"),
    Exchange("Tell me about yourself.", "I am a very small language model. I like stories about animals."),
    Exchange("Are you a person?", "No, I am a very small language model."),
)
FAREWELLS = (
    Exchange("Thank you!", "You are welcome!"),
    Exchange("Thanks", "You are welcome!"),
    Exchange("Goodbye!", "Goodbye! Have a nice day."),
    Exchange("Bye", "Goodbye! Have a nice day."),
)


def converse(dice: Dice) -> list[Message]:
    """A whole conversation of one to six exchanges."""
    messages: list[Message] = []
    if dice.chance(0.2):
        messages.append({"role": "system", "content": dice.pick(SYSTEM_PROMPTS, skew=1.0)})
    exchanges: list[Exchange] = []
    if dice.chance(0.2):
        exchanges.append(_small_talk(dice))
    exchanges += (
        _story_hour(dice) if dice.chance(0.25) else [ask(dice) for _ in range(dice.pick((2, 3, 1, 4, 6), skew=0.8))]
    )
    if dice.chance(0.1):
        exchanges.append(_unknown(dice))
    if dice.chance(0.15):
        exchanges.append(dice.pick(FAREWELLS, skew=0.5))
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def _small_talk(dice: Dice) -> Exchange:
    if dice.chance(0.2):
        name = dice.pick(SHE + HE, skew=0.5).text
        return Exchange(f"My name is {name}.", f"Hello, {name}! How can I help you today?")
    return dice.pick(SMALL_TALK, skew=0.4)


def _unknown(dice: Dice) -> Exchange:
    subject = dice.pick(UNKNOWN_SUBJECTS, skew=0.4)
    question = dice.pick((f"Tell me about {subject}.", f"What do you know about {subject}?", f"Explain {subject}."))
    question = dice.pick(UNKNOWN_QUESTIONS, skew=0.4) if dice.chance(0.5) else question
    return Exchange(question, "I am sorry, I do not know that. I only know short stories and simple things.")


def _story_hour(dice: Dice) -> list[Exchange]:
    kind = dice.pick(KINDS + PEOPLE, skew=0.5)
    named = dice.chance(0.65)
    story = tell_story(dice, kind if named else None)
    subject = f" about a {kind.noun}" if named else ""
    request = dice.pick(
        (f"Tell me a story{subject}.", f"Write a short story{subject}.", f"Please tell me a story{subject}.")
    )
    count = dice.pick((1, 2, 3, 0), skew=0.8)
    follow_ups = dice.shuffled(story.questions)[:count]
    return [Exchange(request, story.text), *(Exchange(*follow_up) for follow_up in follow_ups)]
