"""The conformance suite: the proof that a backend keeps to the specification.

Run it as ``lowbit conformance NAME``, or through pytest itself as
``pytest -p lowbit_conformance.plugin --pyargs lowbit_conformance --backend NAME``.

`cases` says which cases there are, `inputs` makes their arrays, `calls` calls the backend with poisoned outputs and
guarded inputs, `compare` judges, and the ``test_*`` files tie them to the clauses of the specification. `plugin` is
the pytest plugin and `command` the command line. The suite reaches a backend only through `lowbit.backend`.
"""

SUITE_VERSION = "0.1"
