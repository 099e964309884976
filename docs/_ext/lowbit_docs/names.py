"""Links for short names: `bounds` in "the chapter `bounds`", `linear.qgemv`, `integer_bounds`.

Prose in a chapter calls other chapters by their last name. Sphinx knows only full names, and a single backtick is also
how an argument is written; so a short name becomes a link where it says itself what it is: it has a dot or an
underscore in it, or the word "chapter" in front of it.
"""

import re
from collections.abc import Collection

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

from lowbit.operations import OPERATIONS

PACKAGE = "lowbit"
_CHAPTER = re.compile(r"\bchapters?(\s+\w+,?)?(\s+and)?\s+$")


def full_name(target: str, before: str, known: Collection[str]) -> str | None:
    """What a short name stands for, if it is one.

    Args:
        target: the name as written.
        before: the text in front of it.
        known: full names that there are pages for.

    Returns:
        The full name; None where nothing, or more than one thing, is called so.
    """
    if not ("." in target or "_" in target or _CHAPTER.search(before)):
        return None
    if operation := OPERATIONS.get(target):
        name = f"{operation.reference.__module__}.{operation.reference.__name__}"
        return name if name in known else None
    found = {name for name in known if name.startswith(f"{PACKAGE}.") and name.endswith(f".{target}")}
    inner = {name for name in found if name.rpartition(".")[0] in found}  # the chapter of a package of its own name
    return (inner or found).pop() if len(inner or found) == 1 else None


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
