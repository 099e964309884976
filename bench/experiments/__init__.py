"""Experiments: the claims of the papers, measured on weights that a fresh machine can get or make.

    cd bench
    python -m experiments                 # all of them; finished rows are kept, and a second run resumes
    python -m experiments ksort --quick   # one of them on little text, to see it work

Each experiment is a list of rows (`experiments.running`). A row says what it measured and on what, and holds the losses
of every window of the text, so that two rows are compared in pairs. The results are ``docs/data/results/*.json``, which
the pages *Results* of the documentation show.
"""
