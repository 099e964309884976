"""Pictures that follow the colours of the page, say in words what they show, and scroll where the page is narrow.

``.. drawing:: figures/parts.svg`` puts a drawing into the page itself, so that its colours are those of the page.
``.. plot:: figures/NAME.py`` draws with matplotlib; its alternative text is the docstring of the script.
"""

import ast
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.sphinxext.plot_directive import PlotDirective
from sphinx.util.docutils import SphinxDirective


class Drawing(SphinxDirective):
    """``.. drawing:: FILE``: an SVG file of ours; ``:alt:`` says what it shows, the content is its caption."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        if "alt" not in self.options:
            raise self.error(f"the drawing {self.arguments[0]} has no alternative text: write one after :alt:")
        relative, file = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        said = nodes.unescape(self.options["alt"]).replace("&", "&amp;").replace('"', "&quot;").replace("\n", " ")
        drawn = (
            Path(file).read_text("utf-8").replace("<svg ", f'<svg class="drawing" role="img" aria-label="{said}" ', 1)
        )
        figure = nodes.figure("", nodes.raw("", drawn, format="html"), align="default")
        if self.content:
            figure += nodes.caption("", "", *self.parse_inline(" ".join(self.content))[0])
        return [figure]


class Plot(PlotDirective):
    """matplotlib's ``plot``, with the docstring of the script as the alternative text."""

    def run(self) -> list[nodes.Node]:
        builder = self.state.document.settings.env
        script = Path(builder.srcdir, self.arguments[0])
        builder.note_dependency(str(script))
        said = ast.get_docstring(ast.parse(script.read_bytes()))
        if not said:
            raise self.error(f"{script.name} has no docstring to say what the picture shows")
        self.options.setdefault("alt", " ".join(said.replace("`", "").split()))
        shown: list[nodes.Node] = super().run()  # type: ignore[no-untyped-call]  # matplotlib's directive has no types
        return shown
