"""Chat templates are run as transformers runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.asking.chat_template import ChatTemplate
from inflight.asking.refusal import Refusal
from inflight.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Größe <b>?"},
    {"role": "assistant", "content": " Two. "},
    {"role": "user", "content": "And?"},
]
CHATML = """{{ bos_token }}{% for message in messages %}
    {%- if loop.index0 > 90 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{ messages[0] | tojson }} {{ strftime_now("%Y")[:2] }}
{% for message in messages if message.role == 'assistant' %}
{% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def render(template: ChatTemplate, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> str:
    return template.render(messages, **{"add_generation_prompt": True, "continue_final_message": False, **options})


@pytest.mark.slow
@pytest.mark.parametrize("source", [None, CHATML], ids=["the default model's", "chatml"])
@pytest.mark.parametrize("generates", [True, False])
def test_it_is_what_transformers_makes(source: str | None, generates: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(CHECKPOINT), local_files_only=True)
    ours = ChatTemplate.load(CHECKPOINT)
    if source is not None:
        theirs.chat_template = source
        ours = ChatTemplate(source, {"bos_token": theirs.bos_token})
    assert ours is not None
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generates)
    assert render(ours, add_generation_prompt=generates) == expected


@pytest.mark.parametrize(
    "given", ["{{ 1 }}", [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "{{ 1 }}"}]]
)
def test_it_may_stand_in_the_tokenizers_configuration(tmp_path: Path, given: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert render(template) == "1"


def test_chats_with_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    given = [{"name": "default", "template": "none"}, {"name": "tool_use", "template": "{{ tools[0].type }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.knows_tools
    assert render(template) == "none"
    assert render(template, tools=[{"type": "function"}]) == "function"
    assert not ChatTemplate("none", {}).knows_tools


def test_a_checkpoint_may_have_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_a_wrong_template_is_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigurationError, match="no jinja template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[99].content }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(Refusal, match="the chat template does not take these messages"):
        render(ChatTemplate(source, {}))


def test_a_message_that_the_template_changes_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[-1].content | upper }}", {})
    with pytest.raises(Refusal, match="cannot be continued"):
        render(template, continue_final_message=True)
