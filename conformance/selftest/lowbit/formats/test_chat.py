"""Chat templates: the texts that transformers would write, and templates that are wrong, endless or greedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import tiny_gguf

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats import chat
from lowbit.formats.chat import ChatTemplate, Message
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.formats.tokenizer import until
from lowbit.runtime import open_model

TALK = [
    Message("system", "Be brief."),
    Message("user", 'Say "hi" & <go>'),
    Message("assistant", "hi"),
    Message("user", "ü"),
]
CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You help.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}

{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate("a.gguf", source, tokens)


def test_blocks_take_no_line_of_their_own() -> None:
    """As transformers sets Jinja up: trim_blocks and lstrip_blocks."""
    assert template(CHATML).render(TALK[1:2]) == (
        "<|im_start|>system\nYou help.<|im_end|>\n"
        '<|im_start|>user\nSay "hi" & <go><|im_end|>\n'
        "\n<|im_start|>assistant\n"
    )


def test_what_templates_rely_on() -> None:
    """Names of tokens, plain JSON, loops that are left early, blocks for training, no date."""
    source = (
        "{{ bos_token }}{{ messages[1] | tojson }}"
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% generation %}[{{ m.role }}]{% endgeneration %}{% endfor %}{{ strftime_now is defined }}"
    )
    written = template(source, bos_token="<s>").render(TALK)
    assert written == '<s>{"role": "user", "content": "Say \\"hi\\" & <go>"}[system][user]False'


def test_there_are_no_tools_and_no_documents() -> None:
    """Both are None, as transformers passes them, so a template that asks for that leaves their blocks out."""
    source = "{% if tools is not none %}tools{% endif %}{{ documents is none and tools is defined }}"
    assert template(source).render(TALK) == "True"


def test_a_template_refuses_a_conversation() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}fine"
    assert template(source).render(TALK[1:]) == "fine"
    with pytest.raises(ArgumentError, match="refused by the chat template: no system messages"):
        template(source).render(TALK)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[9].content }}", "UndefinedError"),
    ],
)
def test_a_wrong_template_is_an_error_of_its_file(source: str, told: str) -> None:
    with pytest.raises(FormatError, match=f"a.gguf: chat template is .*{told}"):
        template(source).render(TALK)


def test_an_endless_template_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(FormatError, match="still running after 1 s"):
        template(endless).render(TALK)


def test_wrong_messages() -> None:
    with pytest.raises(ArgumentError, match="number of messages is 0"):
        template("x").render([])
    with pytest.raises(ArgumentError, match="role is 'tool'; allowed: system, user, assistant"):
        template("x").render([Message("tool", "7")])
    with pytest.raises(FormatError, match="chat template is 262145 characters long"):
        template("x" * 262145)


def test_the_template_of_a_gguf_file(tmp_path: Path) -> None:
    """With the names of its tokens; a file without one has none."""
    path = tiny_gguf.write(tmp_path / "a.gguf", metadata={"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"})
    found = open_model(path).tokenizer.chat
    assert found is not None and found.render(TALK) == "<|begin|><|end|>"
    assert open_model(tiny_gguf.write(tmp_path / "b.gguf")).tokenizer.chat is None


@pytest.mark.parametrize(
    ("settings", "file", "expected"),
    [
        ({}, None, None),
        ({"chat_template": "one {{ eos_token }}", "eos_token": "</s>"}, None, "one </s>"),
        ({"chat_template": "one"}, "file {{ bos_token }}", "file <s>"),
        (
            {"chat_template": [{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]},
            None,
            "three",
        ),
    ],
)
def test_the_template_of_a_directory(
    settings: dict[str, Any], file: str | None, expected: str | None, tmp_path: Path
) -> None:
    """The file comes first, then the field, of several the default."""
    path = tiny_checkpoint.write(tmp_path / "m", tiny_checkpoint.published(tiny_checkpoint.MIXTRAL))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}} | settings))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    found = read_tokenizer(open_checkpoint(path)).chat
    assert (None if found is None else found.render(TALK)) == expected


def test_damaged_templates_of_a_directory(tmp_path: Path) -> None:
    path = tiny_checkpoint.write(tmp_path / "m", tiny_checkpoint.published(tiny_checkpoint.MIXTRAL))
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"chat_template\.jinja: text is undecodable at byte 0"):
        read_tokenizer(open_checkpoint(path))
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag", "template": "x"}]}')
    with pytest.raises(FormatError, match="without the name default"):
        read_tokenizer(open_checkpoint(path))


def test_a_text_ends_before_a_stop_string() -> None:
    """Wherever it is cut into pieces, and whatever begins like it; nothing is read after it."""
    text, stops = "ab\n\nUse\n\nUser: x", ["\n\nUser:", "zzz"]
    for size in range(1, len(text) + 1):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert "".join(until(pieces, stops)) == "ab\n\nUse"
    assert "".join(until(iter(text), [])) == text
    rest = iter("abc.def")
    assert "".join(until(rest, ["."])) == "abc"
    assert "".join(rest) == "def"
