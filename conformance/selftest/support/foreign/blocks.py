"""A program that multiplies blocks of integers by codes, with the specification's own function: it tests the way."""

import json
import sys

import numpy as np

from lowbit.backend.wire import as_json, from_json
from lowbit.linear.integer import qgemm_bfp

ARITHMETIC = {"form": "integer", "accumulator": "float64", "roundings": {"rows": 1, "groups": 2, "constant": 4}}
SAID = {"name": "blocks", "operations": {"linear.qgemm_bfp": {"limits": {"bits": [4]}, "arithmetic": ARITHMETIC}}}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        result: object = SAID
        if request["do"] == "run":
            given = {name: from_json(tree) for name, tree in request["arguments"].items()}
            result = as_json(qgemm_bfp(**given).astype(np.float32))
        print(json.dumps({"id": request["id"], "result": result}), flush=True)


if __name__ == "__main__":  # pytest imports every file for its doctests
    main()
