"""The training text: stories, stories with questions, plain questions and conversations, marked up as documents.

The same seed gives the same documents. Knows the marks that the vocabulary reserves, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from dialogues import Message, converse
from dice import Dice
from questions import ask
from stories import tell_story

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
END_OF_TURN = "<|end_of_turn|>"
PAD = "<pad>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BEGIN_OF_TEXT, END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('A role is system, user or assistant, not ' + message['role'] + '.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end_of_turn|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def documents(seed: int, count: int) -> Iterator[str]:
    """`count` documents, each from its begin mark to its end mark.

    A few lack the begin mark or have it twice, as text does that a client has marked up before the tokenizer does.
    """
    dice = Dice(seed)
    for _ in range(count):
        marks = "" if dice.chance(0.08) else BEGIN_OF_TEXT * (2 if dice.chance(0.05) else 1)
        yield marks + _body(dice) + END_OF_TEXT


def render(messages: list[Message]) -> str:
    """The messages as the chat template writes them, less the begin mark."""
    return "".join(f"<|{message['role']}|>{message['content']}{END_OF_TURN}" for message in messages)


def _body(dice: Dice) -> str:
    form = dice.pick(("conversation", "questions", "story", "story and questions"), skew=0.6)
    if form == "conversation":
        return render(converse(dice))
    if form == "story":
        return tell_story(dice).text
    if form == "story and questions":
        story = tell_story(dice)
        asked = dice.shuffled(story.questions)[: dice.pick((2, 3, 1, 4))]
        return "\n\n".join([story.text, *(f"Question: {question}\nAnswer: {answer}" for question, answer in asked)])
    exchanges = [ask(dice) for _ in range(dice.pick((2, 4, 1, 3, 6), skew=0.8))]
    return "\n\n".join(f"Question: {exchange.question}\nAnswer: {exchange.answer}" for exchange in exchanges)
