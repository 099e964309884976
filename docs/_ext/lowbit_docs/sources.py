"""Where each formula of a paper stands in the code: collected from the ``Source:`` lines of the chapters.

A source line is a list: ``Source: QIGen §2, equations 1 and 2; Algorithm 1; errata Q1 to Q5.`` A part that names no
work speaks of the work before it. A page lists what a work contains, one field an entry, and says where it is::

    .. source-index:: QIGen

       :Equation 1: the factored dot product.

An entry that no chapter cites says so. A chapter that cites an entry missing from the list is warned about. Sections
(``§3.1``) are entries like others, for works whose index lists any.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains import Domain
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_id, make_refnode

from lowbit_docs.reading import Line

logger = logging.getLogger(__name__)

_WORK = re.compile(r"(QIGen|MoE|K-sort|GQA|errata)\b")
_NUMBERS = r"(?:(?:, | and | to )?(?:\b[A-Z])?\d+\b)+"
_NAMED = "equation|algorithm|table|figure"
_PLACES = re.compile(rf"\b({_NAMED})s? ({_NUMBERS})|\b((?=[QMBGHP]\d){_NUMBERS})", re.IGNORECASE)
_NUMBER = re.compile(r"(to )?([A-Z]?)(\d+)")
_SECTION = re.compile(r"(to )?§(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Citation:
    """One place of one work, cited by one function or chapter."""

    work: str
    place: str
    name: str
    docname: str
    location: str


class Sources(Domain):
    """What the pages read so far cite and list; kept by Sphinx between builds."""

    name = "sources"
    label = "Sources"
    data_version = 1
    initial_data: ClassVar = {"cited": [], "listed": []}

    @property
    def cited(self) -> list[Citation]:
        """Every citation."""
        found: list[Citation] = self.data["cited"]
        return found

    @property
    def listed(self) -> list[tuple[str, str, str]]:
        """Work, place and page of every entry of an index."""
        found: list[tuple[str, str, str]] = self.data["listed"]
        return found

    def note(self, name: str, doc: Iterable[Line], file: Path) -> None:
        """Remember what the source line of a docstring cites."""
        lines = list(doc)
        start = next((index for index, line in enumerate(lines) if line[1].startswith("Source: ")), len(lines))
        end = next((index for index in range(start, len(lines)) if not lines[index][1]), len(lines))
        text = " ".join(text for _, text in lines[start:end]).removeprefix("Source: ")
        for work, place in citations(text):
            location = f"{file}:{lines[start][0]}"
            self.cited.append(Citation(work, place, name, self.env.current_document.docname, location))

    def names(self, work: str, place: str) -> list[str]:
        """The functions and chapters that cite this place."""
        return own_first(place, dict.fromkeys(c.name for c in self.cited if (c.work, c.place) == (work, place)))

    def clear_doc(self, docname: str) -> None:
        self.cited[:] = [citation for citation in self.cited if citation.docname != docname]
        self.listed[:] = [entry for entry in self.listed if entry[2] != docname]

    def check_consistency(self) -> None:
        """Warn of every citation without an entry, where the work has an index at all."""
        entries = {(work, place) for work, place, _ in self.listed}
        kinds = {(work, place[0] == "§") for work, place in entries}
        for citation in self.cited:
            if (citation.work, citation.place[0] == "§") in kinds and (citation.work, citation.place) not in entries:
                message = "%s %s is cited here, and the index of that work has no such entry"
                logger.warning(message, citation.work, citation.place, location=citation.location)


def own_first(place: str, names: Iterable[str]) -> list[str]:
    """The functions that are named after a place stand before those that only cite it.

    >>> own_first("Equation 2", ["linear.qgemv", "linear.equation_21", "linear.equation_2_left"])
    ['linear.equation_2_left', 'linear.qgemv', 'linear.equation_21']
    """
    own = re.compile(rf"\b{place.lower().replace(' ', '_')}(?!\d)")
    return sorted(names, key=lambda name: own.search(name) is None)


def sources(env: BuildEnvironment) -> Sources:
    """The one instance that this build has."""
    domain = env.domains["sources"]
    assert isinstance(domain, Sources)
    return domain


class source_links(nodes.paragraph):  # noqa: N801 (docutils' names of nodes are in lower case)
    """Where the links of one entry go, once every chapter has been read."""


class SourceIndex(SphinxDirective):
    """``.. source-index:: WORK``: what a work contains, and which functions are it."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        work = self.arguments[0]
        index = nodes.definition_list(classes=["source-index"])
        for entry in (field for node in self.parse_content_to_nodes() for field in node.findall(nodes.field)):
            name, body = entry.children
            place = name.astext()
            target = make_id(self.env, self.state.document, "", f"{work}-{place}")
            term = nodes.term(place, place, ids=[target])
            links = source_links(work=work, place=place)
            index += nodes.definition_list_item("", term, nodes.definition("", *body.children, links))
            sources(self.env).listed.append((work, place, self.env.current_document.docname))
        return [index]


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Write below each entry the functions that cite it."""
    python = app.env.domains["py"]
    assert isinstance(python, PythonDomain)
    for empty in list(doctree.findall(source_links)):
        links = nodes.paragraph(classes=["source-links"])
        for name in sources(app.env).names(empty["work"], empty["place"]):
            entry = python.objects.get(name) or python.modules[name]
            links += nodes.Text(", " if len(links) else "")
            text = nodes.literal(text=name.removeprefix("lowbit."))
            links += make_refnode(app.builder, docname, entry.docname, entry.node_id, text)
        if not len(links):
            links += nodes.emphasis(text="in no chapter")
        empty.replace_self(links)


def pages_to_refresh(app: Sphinx, env: BuildEnvironment, *changes: set[str]) -> list[str]:
    """An index is written again whenever any chapter was."""
    return sorted({docname for _, _, docname in sources(env).listed}) if any(changes) else []


def citations(text: str) -> Iterator[tuple[str, str]]:
    """The places that a source line cites.

    >>> list(citations("QIGen §2, equations 1 and 2; Algorithm 1; errata Q3 to Q4."))
    [('QIGen', '§2'), ('QIGen', 'Equation 1'), ('QIGen', 'Equation 2'), ('QIGen', 'Algorithm 1'), ('errata', 'Q3'), \
('errata', 'Q4')]
    >>> list(citations("RMSNorm equation 4; GQA §2.2 and figure 2"))
    [('GQA', '§2.2'), ('GQA', 'Figure 2')]
    >>> [place for _, place in citations("MoE offloading §3.1 to §3.3, §4")]
    ['§3.1', '§3.2', '§3.3', '§4']
    """
    work = ""
    for part in (part.strip() for part in text.split(";")):
        if named := _WORK.match(part):
            work = named[1]
        elif not re.match(f"§|{_NAMED}", part, re.IGNORECASE):
            work = ""  # another work, of which no page keeps an index
        for place in _sections(part) if work else []:
            yield work, place
        for kind, numbers, errata in _PLACES.findall(part) if work else []:
            for number in _expanded(numbers or errata):
                yield work, f"{kind.capitalize()} {number}".strip()


def _sections(part: str) -> Iterator[str]:
    """``§3.1 to §3.3`` is §3.1, §3.2 and §3.3."""
    last = 0
    for to, chapter, section in _SECTION.findall(part):
        for number in range(last + 1, int(section)) if to else ():
            yield f"§{chapter}.{number}"
        yield f"§{chapter}.{section}" if section else f"§{chapter}"
        last = int(section or 0)


def _expanded(numbers: str) -> Iterator[str]:
    """Single numbers: ``Q1 to Q3, Q5`` is Q1, Q2, Q3 and Q5."""
    last = 0
    for to, letter, digits in _NUMBER.findall(numbers):
        for number in range(last + 1 if to else int(digits), int(digits) + 1):
            yield f"{letter}{number}"
        last = int(digits)
