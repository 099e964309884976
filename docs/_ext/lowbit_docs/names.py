"""Links for short names: `bounds` in "the chapter `bounds`", `linear.qgemv`, `integer_bounds`.

Prose in a chapter calls other chapters by their last name. Sphinx knows only full names, and a single backtick is also
how an argument is written; so a short name becomes a link where it says itself what it is: it has a dot or an
underscore in it, or the word "chapter" in front of it.
"""

import re
from collections.abc import Container

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

from lowbit.operations import OPERATIONS

PACKAGE = "lowbit"
_CHAPTER = re.compile(r"\bchapters?(\s+\w+,?)?(\s+and)?\s+$")


def full_name(target: str, before: str, known: Container[str]) -> str | None:
    """What a short name stands for, if it is one.

    Args:
        target: the name as written.
        before: the text in front of it.
        known: full names that there are pages for.
    """
    name = f"{PACKAGE}.{target}"
    if operation := OPERATIONS.get(target):
        name = f"{operation.reference.__module__}.{operation.reference.__name__}"
    says = "." in target or "_" in target or _CHAPTER.search(before)
    return name if says and name in known else None


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.Element | None:
    """Sphinx asks this about every reference that it cannot resolve."""
    if node.get("reftype") != "obj" or "refdoc" not in node:
        return None
    python = env.domains["py"]
    assert isinstance(python, PythonDomain)
    siblings = node.parent.children if node.parent else []
    before = "".join(sibling.astext() for sibling in siblings[: siblings.index(node)]) if node in siblings else ""
    name = full_name(node["reftarget"], before, {*python.objects, *python.modules})
    if name is None:
        return None
    entry = python.objects.get(name) or python.modules[name]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)
