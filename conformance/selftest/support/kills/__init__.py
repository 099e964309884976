"""Every known defect against the suite: the habits, the kill matrix, long runs, and what ties clauses to defects.

The arithmetical defects ship with the suite, whose diagnosis names them. What is here measures the suite itself and
ships nowhere: programs that import it are started with this folder's parent on ``PYTHONPATH``.
"""
