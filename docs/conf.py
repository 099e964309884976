"""How the documentation is built: ``nox -s docs``."""

import os
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from jupyter_client.manager import KernelManager

HERE = Path(__file__).parent
SOURCES = ("spec", "backends", "conformance", "conformance/selftest/support", "bench")
sys.path[:0] = [str(HERE / "_ext"), *(str(HERE.parent / root) for root in SOURCES)]

project = "lowbit"
author = "the lowbit authors"
project_copyright = "the lowbit authors, Apache-2.0"
language = "en"
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]["version"]

extensions = ["lowbit_docs", "myst_nb", "sphinx.ext.mathjax"]
exclude_patterns = ["_build", "_ext"]

# The notebook is executed while the pages are built; a cell that fails is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_allow_errors = False
# What is said to its kernel over local ports is encrypted, so that other users of the machine cannot read it.
KernelManager.transport_encryption.default_value = "auto"
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:5], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# A single backtick links to what it names, and is plain code where it names an argument.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", ".*")]
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 100

# Mathematics without the network: one script from an installed package, copied beside the pages. It draws SVG, so it
# needs no fonts either.
mathjax = distribution("sphinx-mathjax-offline").locate_file("sphinx-mathjax-offline/static/mathjax/tex-svg-full.js")
mathjax_path = "tex-svg-full.js"

# Figures are drawn by the chapters' own functions while the pages are built, the same bytes every time.
plot_basedir = str(HERE)
plot_formats = ["svg"]
plot_html_show_formats = False
plot_html_show_source_link = False
plot_rcparams = {
    "svg.hashsalt": "lowbit",
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,  # on the page's own ground; lowbit.css turns the colours round on a dark one
}
plot_apply_rcparams = True

html_theme = "furo"
html_title = f"lowbit {release}"
html_static_path = ["_static", str(mathjax)]
html_css_files = ["lowbit.css"]
html_js_files = ["focus.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
