"""PyTorch: the product with 4-bit weights of its CPU build, in float32: the backend `lowbit_adapters.torch_int4`."""

from atlas.entry import Entry, Project
from lowbit.contract.rounding import Arithmetic

LIMITS = {
    "format": "affine: zero_point, minimum",
    "activations": "float32",
    "bits": 4,
    "group_size": (32, 64, 128, 256),
}

PROJECT = Project(
    "PyTorch",
    ("torch",),
    tuple(
        Entry("_weight_int4pack_mm_for_cpu", "torch", name, LIMITS, Arithmetic("offset"), backend="torch")
        for name in ("linear.qgemm", "linear.qgemv")
    ),
)
