"""The process that runs one chat template: it reads a request and writes an answer, both in JSON.

`lowbit.formats.chat` starts it as a program, with a deadline. It imports nothing from lowbit, so that it starts fast
and its memory can be limited to a little more than Python's own. Jinja is imported before the limit is set.

Source: transformers, ``utils/chat_template_utils.py``.
"""

import json
import resource
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn


class RefusedError(Exception):
    """The template called ``raise_exception``."""


def refuse(message: object) -> NoReturn:
    """The function that templates call as ``raise_exception``."""
    raise RefusedError(str(message))


def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def rendered(template: str, variables: Mapping[str, Any], most: int) -> str:
    """The text of a template, at most `most` characters of it.

    Raises:
        Exception: whatever the template raises.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A block that marks the model's own text for training; it does not change the text."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    pieces, size = [], 0
    for piece in environment.from_string(template).generate(**variables):
        size += len(piece)
        if size > most:
            raise ValueError(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def answered(request: Mapping[str, Any]) -> dict[str, str]:
    """The answer to a request: a text, or what went wrong."""
    for module in ("jinja2.ext", "jinja2.sandbox"):
        import_module(module)
    for limit, most in ((resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    try:
        return {"kind": "text", "text": rendered(request["template"], request["variables"], request["most"])}
    except RefusedError as error:
        return {"kind": "refused", "text": str(error)}
    except (Exception, RecursionError) as error:
        return {"kind": "failed", "text": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    json.dump(answered(json.load(sys.stdin)), sys.stdout)
