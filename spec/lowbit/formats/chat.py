"""Chat templates: from the messages of a conversation to the text that a model was trained on.

A model for conversations was trained on texts in which marks separate the messages, such as ``<|im_start|>user``. The
marks differ from model to model, so a model carries a *template* that writes them: a program in the language of Jinja.
It is in the field ``tokenizer.chat_template`` of a GGUF file, and in ``chat_template.jinja`` or
``tokenizer_config.json`` of a directory. It gets the messages, each with a role and a content, and the names of the
tokens that begin and end a sequence. With ``add_generation_prompt`` it also writes what comes before the answer. There
are no ``tools`` and no ``documents``: both are None, as in transformers if none are given.

**A template is a program from a stranger.** It runs in Jinja's sandbox, which keeps it from files and from attributes
that Python hides. The sandbox does not stop a loop, and a one-line template can request all memory. So it runs in a
process of its own, which has `SECONDS` of time and `MEMORY_BYTES` of memory, and writes at most `MOST_CHARACTERS`.

Templates are written for transformers, so the environment is the same as there: blocks take no line of their own
(``trim_blocks``, ``lstrip_blocks``), loops may be left early, ``raise_exception`` reports wrong messages, and
``tojson`` writes plain JSON. ``strftime_now`` is missing: with it, the same conversation would be another text each
day.

A message that spells out a special token is encoded with this token, as in transformers.

Source: transformers, ``utils/chat_template_utils.py``; Jinja 3.1.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.errors import ArgumentError, FormatError
from lowbit.system.interpreters import python_command, python_environment

ROLES = ("system", "user", "assistant")
SECONDS = 10
MEMORY_BYTES = 2**29
MOST_CHARACTERS = 2**22
MOST_TEMPLATE = 2**18
"""The most characters of a template; published ones have a few thousand."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: who wrote it, one of `ROLES`.
        content: its text.
    """

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a model.

    Attributes:
        file: the file that holds it, for messages.
        source: the program.
        tokens: the texts of special tokens by the names that templates use, such as ``bos_token``.

    Raises:
        FormatError: the program is longer than `MOST_TEMPLATE`.
    """

    file: str
    source: str
    tokens: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(self.source) > MOST_TEMPLATE:
            raise self._wrong(f"{len(self.source)} characters long", f"at most {MOST_TEMPLATE}")

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Raises:
            ArgumentError: no messages, a role that does not exist, or messages that the template refuses.
            FormatError: the template is not valid, takes too long, or asks for too much memory.
        """
        if not messages:
            raise ArgumentError("number of messages", 0, "at least 1")
        for message in messages:
            if message.role not in ROLES:
                raise ArgumentError("role", repr(message.role), ", ".join(ROLES))
        request = {
            "template": self.source,
            "most": MOST_CHARACTERS,
            "memory": MEMORY_BYTES,
            "variables": {
                **self.tokens,
                "messages": [{"role": message.role, "content": message.content} for message in messages],
                "add_generation_prompt": True,
                "tools": None,
                "documents": None,
            },
        }
        return self._answer(request)

    def _answer(self, request: Mapping[str, Any]) -> str:
        """The answer of the process that runs the template."""
        command = python_command(str(Path(__file__).with_name("chat_process.py")))
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=SECONDS,
                env=python_environment(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._wrong(f"still running after {SECONDS} s", "a program that ends") from None
        try:
            answer = json.loads(done.stdout)
            kind, text = str(answer["kind"]), str(answer["text"])
        except (ValueError, TypeError, KeyError):
            raise self._wrong("ended without a text", f"a program of at most {MEMORY_BYTES // 2**20} MiB") from None
        if kind == "refused":
            raise ArgumentError("messages", f"refused by the chat template: {text}", "a conversation that it accepts")
        if kind != "text":
            raise self._wrong(text, "a program that runs")
        return text

    def _wrong(self, given: str, allowed: str) -> FormatError:
        return FormatError(self.file, "chat template", given, allowed)
