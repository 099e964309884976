"""Reports: what a run of the suite says, to people and to programs.

`gather` finds out what was judged, by what and where; `model` holds the data and its id; `matrix` counts by operation,
width and group. `terminal`, `document` (JSON), `junit` and `html` say it.
"""

from lowbit_conformance.report.document import text_of, write_json
from lowbit_conformance.report.gather import report_of
from lowbit_conformance.report.html import write_html
from lowbit_conformance.report.junit import write_junit
from lowbit_conformance.report.model import Report, as_json
from lowbit_conformance.report.terminal import show

__all__ = ["Report", "as_json", "report_of", "show", "text_of", "write_html", "write_json", "write_junit"]
