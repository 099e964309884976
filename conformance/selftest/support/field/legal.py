"""Unusual but legal ways to compute: what they declare is what they do, and the suite may refuse none of them.

As a program it runs each with the random cases of many seeds: ``python -m field.legal 200``; all of them take minutes.
"""

import os
import sys
from pathlib import Path

from field.judging import Judgement, judge
from lowbit.backend.function import Claim
from lowbit.contract.rounding import Arithmetic, any_order

GPTQ: dict[str, object] = {"format": "gptq-v1", "bits": 4, "group_size": 128}
ANY = Arithmetic("dequantised")
HALF, BRAIN = Arithmetic("dequantised", weights="float16"), Arithmetic("dequantised", weights="bfloat16")
FACTORED = Arithmetic("factored", weights="exact")


def of_gptq(name: str, arithmetic: Arithmetic, types: str = "float16") -> tuple[str, Claim]:
    place = f"legal_kernels:KERNELS.{name}" if ":" not in name else name
    return place, Claim("linear.gemm", {**GPTQ, "activations": types, "result": types}, arithmetic)


def of_integers(weights: str, x: str) -> tuple[str, Claim]:
    limits: dict[str, object] = {"format": weights, "activations": x, "result": "float32"}
    return f"numpy_kernels:{weights}_{x}", Claim("linear.gemm_cast", limits, FACTORED)


def chunks(length: int) -> Arithmetic:
    return Arithmetic("dequantised", "float16", any_order, "float16", length)


PLAIN = (
    *("kahan", "ordered", "reversed", "shuffled", "smallest_first", "split_in_4", "split_in_7", "lanes_8"),
    *("lanes_64", "pairwise", "fused"),
)
WAYS: dict[str, tuple[str, Claim]] = {
    "sums_of_32": of_gptq("sums_of_32", chunks(32)),
    "sums_of_16": of_gptq("sums_of_16", chunks(16)),
    **{name: of_gptq(name, ANY) for name in PLAIN},
    "double": of_gptq("double", Arithmetic("dequantised", "float64")),
    "half_weights": of_gptq("half_weights", HALF),
    "brain_weights": of_gptq("brain_weights", BRAIN),
    "weights_in_three_steps": of_gptq("weights_in_three_steps", HALF),
    "scale_and_zero_after_the_sum": of_gptq("numpy_kernels:gptq_factored", FACTORED),
    "scale_and_zero_after_the_sum_bfloat16": of_gptq("numpy_kernels:gptq_factored", FACTORED, "bfloat16"),
    "scale_on_x": of_gptq("scale_on_x", Arithmetic("dequantised", weights="exact")),
    "integer_sums_of_q4_k": of_integers("q4_k", "q8_k"),
    "integer_sums_of_q4_0": of_integers("q4_0", "q8_0"),
}


def judged(name: str, seeds: int) -> Judgement:
    """What the suite says of one way; its host finds the kernels by ``PYTHONPATH``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        return judge(*WAYS[name], seeds)
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def main(seeds: int) -> None:
    """Print each way with its cases and false alarms."""
    alarms = cases = 0
    for name in WAYS:
        found = judged(name, seeds)
        cases, alarms = cases + found.executed, alarms + len(found.failures)
        first = list(found.failures.items())[:1]
        print(f"{name}: {found.executed} cases, {len(found.failures)} failed", *first, flush=True)
    print(f"{len(WAYS)} ways, {seeds} seeds: {cases} cases, {alarms} false alarms")


if __name__ == "__main__":
    main(int(sys.argv[1]))
