"""The Sphinx extension of this documentation: chapters that are their own pages, and indexes made from the code."""

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from lowbit_docs.atlas import Atlas
from lowbit_docs.benchmarks import Benchmarks
from lowbit_docs.chapter import Chapter, ChapterCode, ChapterFile, chapter_code, visit_code
from lowbit_docs.formats import Formats
from lowbit_docs.kernels import KernelCosts, KernelSource, KernelWords
from lowbit_docs.matrix import KillMatrix
from lowbit_docs.names import resolve
from lowbit_docs.offloading import CudaKernels, GpuResults, VirtualTable2
from lowbit_docs.operations import Operations
from lowbit_docs.pages import Parts, index_public_names, number_headings, open_one_branch, shorten_titles, write_pages
from lowbit_docs.pictures import Drawing, Plot
from lowbit_docs.results import Results
from lowbit_docs.soak import Soak
from lowbit_docs.sources import SourceIndex, Sources, fill, pages_to_refresh
from lowbit_docs.tables import Data, Errata, Habits, Verdicts
from lowbit_docs.traceability import Traceability


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directives; Sphinx calls this."""
    app.add_domain(Sources)
    app.add_node(chapter_code, html=(visit_code, None))
    app.add_directive("chapter", Chapter)
    app.add_directive("chapter-code", ChapterCode)
    app.add_directive("chapter-file", ChapterFile)
    app.add_directive("source-index", SourceIndex)
    app.add_directive("parts", Parts)
    app.add_directive("drawing", Drawing)
    app.setup_extension("matplotlib.sphinxext.plot_directive")
    app.add_directive("plot", Plot, override=True)
    app.add_directive("operations", Operations)
    app.add_directive("formats", Formats)
    app.add_directive("traceability", Traceability)
    app.add_directive("kernel-source", KernelSource)
    app.add_directive("kernel-words", KernelWords)
    app.add_directive("kernel-costs", KernelCosts)
    app.add_directive("kill-matrix", KillMatrix)
    app.add_directive("results", Results)
    app.add_directive("soak", Soak)
    app.add_directive("virtual-table2", VirtualTable2)
    app.add_directive("cuda-kernels", CudaKernels)
    app.add_directive("gpu-results", GpuResults)
    app.add_directive("benchmarks", Benchmarks)
    app.add_directive("errata", Errata)
    app.add_directive("atlas", Atlas)
    app.add_directive("data-table", Data)
    app.add_directive("habits", Habits)
    app.add_directive("verdicts", Verdicts)
    app.connect("builder-inited", write_pages)
    app.connect("doctree-read", shorten_titles, priority=900)  # after Sphinx has collected the titles
    app.connect("env-get-outdated", pages_to_refresh)
    app.connect("env-updated", index_public_names)
    app.connect("doctree-resolved", fill)
    app.connect("missing-reference", resolve)
    app.connect("html-page-context", open_one_branch, priority=100)  # before the theme asks for the sidebar
    app.connect("html-page-context", number_headings, priority=900)  # after the theme has made the sidebar
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
