"""The directive ``.. operations::``: every operation of the specification and its clauses, from the code itself."""

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_id

from lowbit.contract.operation import Operation
from lowbit.operations import OPERATIONS
from lowbit_docs.chapter import source_file


class Operations(SphinxDirective):
    """``.. operations::``: one section an operation, in the order in which the chapters declare them."""

    def run(self) -> list[nodes.Node]:
        for module in sorted({chapter(operation) for operation in OPERATIONS.values()}):
            if file := source_file(module):
                self.env.note_dependency(file)
        return [self._section(operation) for operation in OPERATIONS.values()]

    def _section(self, operation: Operation) -> nodes.section:
        section = nodes.section(ids=[make_id(self.env, self.state.document, "", operation.id)])
        section += nodes.title("", "", nodes.literal(text=operation.id))
        reference, _ = self.parse_inline(f":py:mod:`{chapter(operation)}`")
        lead = nodes.paragraph("", f"{operation.title}. Promise: ")
        lead += [nodes.strong(text=operation.promise.value), nodes.Text(". Chapter: "), *reference]
        lead += nodes.Text(f". Source: {operation.source}.")
        section += lead
        clauses = nodes.definition_list(classes=["clauses"])
        for clause, sentence in operation.clauses.items():
            target = make_id(self.env, self.state.document, "", clause)
            term = nodes.term("", "", nodes.literal(text=clause), ids=[target])
            clauses += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph(text=sentence)))
        section += clauses
        self.state.document.note_implicit_target(section)
        return section


def chapter(operation: Operation) -> str:
    """The module whose function an operation is."""
    return operation.reference.__module__
