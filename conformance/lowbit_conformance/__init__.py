"""The conformance suite: the proof that a backend keeps to the specification.

Run it as ``lowbit conformance NAME``, or through pytest itself as
``pytest -p lowbit_conformance.suite.plugin --pyargs lowbit_conformance --backend NAME``.

`cases` says which cases there are, `inputs` makes their arrays, and the ``test_*`` files tie them to the clauses of the
specification; `compare` and `bounded` judge a result. The backend runs in a process of its own, `host`, which
`confinement` separates from the one that judges; the tests speak to it through `remote`, whose arrays lie in `arena`,
and `blame` turns a fault of that process into a verdict. `plugin` is the pytest plugin. It tells `command`, the command
line, through `events` how the run goes, and `watchdog` follows it to its end. `report` is what comes of a run, `bank`
the defects that measure the suite and explain a failure. No process but the host imports a backend.
"""

SUITE_VERSION = "0.1"
