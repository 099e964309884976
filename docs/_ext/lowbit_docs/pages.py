"""The pages of modules: one for each, written when the documentation is built, in the folders of the packages.

The page of a package lists what is in it. Modules and folders that the docstring of the package names come first, in
the order in which it names them; the others follow in the order of the alphabet.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.environment import BuildEnvironment

ROOTS = {
    "spec": ("lowbit",),
    "backends": ("lowbit_numpy", "lowbit_cppyy", "lowbit_cuda", "lowbit_torch", "lowbit_foreign"),
    "conformance/selftest/support": ("lowbit_gpusim",),
}
"""The packages whose modules have pages, by the folder that they are in."""

FOLDER = "reference"
COMMAND_LINE = ("lowbit.cli", "lowbit.__main__")
"""Not part of the specification; `lowbit --help` documents it."""

LONGEST = 30
"""The most characters of a title in the sidebar."""


@dataclass(frozen=True)
class Module:
    """A module that has a page.

    Attributes:
        name: the full name.
        is_package: whether it is a folder of modules.
        doc: its docstring; empty where there is none.
    """

    name: str
    is_package: bool
    doc: str

    @property
    def page(self) -> str:
        """The document: ``reference/lowbit/quantization/packing``."""
        path = f"{FOLDER}/{self.name.replace('.', '/')}"
        return f"{path}/index" if self.is_package else path

    @property
    def sentence(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.partition("\n")[0].removesuffix(".")

    @property
    def title(self) -> str:
        """The title in the sidebar."""
        return short_title(self.sentence, self.name)

    def __contains__(self, other: "Module") -> bool:
        return other.name.rpartition(".")[0] == self.name


def short_title(sentence: str, name: str) -> str:
    """The words before the colon; where they are many, the module's own name.

    >>> short_title("Packing: small codes in 32-bit words", "lowbit.quantization.packing")
    'Packing'
    >>> short_title("What lowbit asks of the operating system: files, folders", "lowbit.system")
    'System'
    >>> short_title("Quantised matrices in a file: what lowbit keeps", "lowbit.formats.checkpoint.quantized_file")
    'Quantised matrices in a file'
    """
    words = sentence.partition(":")[0].replace("`", "").strip()
    if words and len(words) <= LONGEST:
        return words
    own = name.rpartition(".")[2].replace("_", " ")
    return own[0].upper() + own[1:]


def modules(repository: Path) -> Iterator[Module]:
    """Every module that has a page."""
    for root, packages in ROOTS.items():
        for package in packages:
            for file in sorted((repository / root / package).rglob("*.py")):
                parts = file.relative_to(repository / root).with_suffix("").parts
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                if not name.startswith(COMMAND_LINE) and parts[-1] != "__main__":
                    yield Module(name, is_package, ast.get_docstring(ast.parse(file.read_bytes())) or "")


def inside(package: Module, found: Mapping[str, Module]) -> list[Module]:
    """What is in a package, in reading order."""
    named = re.findall(r"`(?:\w+\.)*(\w+)`", package.doc)

    def place(module: Module) -> tuple[int, str]:
        last = module.name.rpartition(".")[2]
        return (named.index(last) if last in named else len(named)), last

    return sorted((module for module in found.values() if module in package), key=place)


def is_part(module: Module) -> bool:
    """Whether the front page lists this folder: the folders of the specification are the parts of the site."""
    return module.is_package and module.name.count(".") == 1 and module.name.startswith("lowbit.")


def text_of(module: Module, children: list[Module]) -> str:
    """The source of a page: the chapter, and for a package what is in it, each with its first sentence."""
    text = ""
    if below := [child for child in children if not is_part(child)]:
        text += "\n.. toctree::\n   :hidden:\n\n" + "".join(f"   /{child.page}\n" for child in below)
    if children:
        text += "\n**In this folder**\n\n" + "".join(entry(child) for child in children)
    return f".. chapter:: {module.name}\n" + indent(text, "   ")


def entry(module: Module) -> str:
    """One line of a list: the title as a link, and what the sentence says after the colon."""
    head, colon, rest = module.sentence.partition(":")
    said = rest.strip() if colon and head.replace("`", "").strip() == module.title else module.sentence
    return f"- :doc:`/{module.page}`" + (f": {said}." if said and said != module.title else "") + "\n"


def write_pages(app: Sphinx) -> None:
    """Write all pages, leave those that have not changed, and remove those of modules that are gone."""
    source = Path(app.srcdir)
    found = {module.name: module for module in modules(source.parent)}
    written = set[Path]()
    for module in found.values():
        page = source / f"{module.page}.rst"
        text = text_of(module, inside(module, found))
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.is_file() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")
        written.add(page)
    for page in (source / FOLDER).rglob("*.rst"):
        if page not in written:
            page.unlink()


class Parts(TocTree):
    """``.. parts:: lowbit``: a toctree of the folders of a package.

    ``:first:`` names folders in reading order, and the others follow; ``:without:`` names folders listed elsewhere.
    """

    required_arguments = 1
    has_content = False
    option_spec: ClassVar = {
        **(TocTree.option_spec or {}),
        "first": directives.unchanged,
        "without": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        found = {module.name: module for module in modules(Path(self.env.srcdir).parent)}
        package = found[self.arguments[0]]
        first, without = (self.options.pop(name, "").split() for name in ("first", "without"))
        folders = {child.name.rpartition(".")[2]: child for child in inside(package, found) if is_part(child)}
        names = [name for name in dict.fromkeys([*first, *folders]) if name in folders and name not in without]
        pages = [f"/{folders[name].page}" for name in names]
        self.content = StringList(pages, self.state.document["source"])
        return super().run()


def shorten_titles(app: Sphinx, doctree: nodes.document) -> None:
    """Give the page of a module its short title wherever another page lists or links to it.

    Sphinx keeps the title of a page twice: for links, and at the top of the page's own table of contents, of which
    the sidebar is made.
    """
    env = app.env
    document = env.current_document.docname
    if not document.startswith(f"{FOLDER}/"):
        return
    name = document.removeprefix(f"{FOLDER}/").removesuffix("/index").replace("/", ".")
    title = short_title(env.titles[document].astext(), name)
    env.titles[document] = nodes.title("", title)
    top = next(env.tocs[document].findall(nodes.reference), None)
    if top is not None and not isinstance(top, pending_xref):
        top.children = []
        top += nodes.Text(title)


def index_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Leave private names out of the index: a fifth of all, which nobody looks up there."""
    entries = env.domains.index_domain.entries
    for page, own in entries.items():
        entries[page] = [entry for entry in own if not entry[1].startswith("_")]


def open_one_branch(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """List in the sidebar only what leads to the page and what is next to it or below.

    Furo asks for all pages on each of them: their number squared, which took two thirds of the time to build.
    """
    if "toctree" in context:
        whole = context["toctree"]
        context["toctree"] = lambda **wanted: whole(**wanted | {"collapse": True})


def number_headings(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Say of the captions in the sidebar which level of heading they are; Sphinx says only that they are headings."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
