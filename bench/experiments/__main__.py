"""The command: ``python -m experiments``."""

import argparse
import sys
from pathlib import Path

from experiments import encoder, groups, heads, keys, llama_cpp, mixed, ngram, qigen, routing, scores, uptraining
from experiments.running import RESULTS, run

MODULES = (ngram, qigen, encoder, keys, scores, heads, uptraining, mixed, routing)
ASKED_FOR = (groups, llama_cpp)
"""What runs only where it is named: it needs a machine that does nothing else, or another project's package."""
EXPERIMENTS = {each.EXPERIMENT.name: each.EXPERIMENT for each in (*MODULES, *ASKED_FOR)}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="experiments", allow_abbrev=False, description="Measure the papers' claims.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}; see the program for the default"
    )
    parser.add_argument("--quick", action="store_true", help="little text and few rows, to see it work")
    parser.add_argument("--fresh", action="store_true", help="measure rows anew that are there")
    parser.add_argument("--out", type=Path, help="the folder of the results; docs/data/results by default")
    options = parser.parse_args()
    for name in options.names:
        if name not in EXPERIMENTS:
            parser.error(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    if options.quick and options.out is None:
        parser.error("--quick needs --out, because its results are none to be kept")
    try:
        for name in options.names or [each.EXPERIMENT.name for each in MODULES]:
            print(run(EXPERIMENTS[name], options.out or RESULTS, quick=options.quick, fresh=options.fresh))
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from here")


if __name__ == "__main__":
    main()
