"""Test vectors: the suite's own inputs with the specification's answers, as files that need neither lowbit nor numpy.

`record` runs the tests of the suite against the reference and keeps every call that they make, so that there is one
source of inputs. `judging` says what a right answer is, `files` how vectors lie in files, and `checking` compares files
with this version. The commands are ``lowbit vectors export DIR`` and ``lowbit vectors check DIR``.
"""
