"""The atlas: public kernels of other projects as plain functions under the suite, one module for each project.

A module lists `Entry` objects, each a format, an operation and types that the project's documentation or source names,
and the functions that they name. A function converts layouts and calls the project's public kernel. It corrects no
result. ``bench/run_atlas.py`` runs a project and keeps what it found in ``docs/data/atlas``; the page of the docs is
made from there.

A module can be imported without its project: what it would take from there refuses by name when it is used.
"""
