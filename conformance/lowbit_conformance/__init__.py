"""The conformance suite: the proof that a backend conforms to the specification.

Run it as ``lowbit conformance NAME``, or through pytest itself as
``pytest -p lowbit_conformance.suite.plugin --pyargs lowbit_conformance --backend NAME``.

Each folder imports only those before it in this list:

* `isolation` runs the backend in a separate process, `host`, and calls it from the process that judges, `remote`.
* `defects` holds mistakes that real kernels make, and the diagnosis that finds them in wrong results.
* `suite` holds the cases, their inputs, the comparisons, and the ``test_*`` files that tie them to the clauses of the
  specification; `plugin` is the pytest plugin that runs them.
* `report` is the result of a run in four forms, `vectors` the same cases as JSON files.
* `cli` is the command line.
* `testing` certifies a plain function in a kernel author's own tests.

`starter` is the package that ``lowbit new-backend`` copies, and `packing` puts codes in words for all of them. Only the
host process imports a backend.
"""
