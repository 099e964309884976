"""AWQ over the line protocol, in plain Python: a vector of bfloat16 times 4-bit codes, to bfloat16.

    lowbit conformance --command 'python awq.py'

No numpy, and nothing of lowbit: any language that reads a line of JSON and writes one can do the same.
"""

import base64
import json
import math
import struct
import sys

CAPABILITIES = {
    "name": "awq-command",
    "version": "1.0",
    "profiles": ["lowbit-1.1/awq-gemv-bf16"],  # a claim, which a run of the whole suite certifies or refutes
    "operations": {
        "linear.gemv": {
            "limits": {"format": ["awq-gemm"], "activations": ["bfloat16"], "result": ["bfloat16"]},
            "arithmetic": {
                "form": "dequantised",
                "accumulator": "float64",  # what a float is in Python
                "roundings": "any_order",
                "weights": "exact",  # a scale of 11 bits times a code less its zero, in 53 bits
            },
        },
    },
}
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In a word, the nibble of each of 8 columns."""
KINDS = {"<i4": "i", "<f2": "e", "bfloat16": "H"}
"""Of the elements of arrays, as the module `struct` calls them. It has no bfloat16, which comes as bit patterns."""


def read(array):
    """The elements of an array, row after row."""
    data = base64.b64decode(array["data"])
    kind = KINDS[array["array"]]
    return struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)


def from_bfloat16(pattern):
    """bfloat16 is the upper half of a float32."""
    return struct.unpack("<f", struct.pack("<I", pattern << 16))[0]


def to_bfloat16(number):
    """The pattern of the nearest bfloat16, of two the even one: rounded once, from the float64 itself."""
    sign = 0x8000 if math.copysign(1, number) < 0 else 0
    if math.isnan(number):
        return 0x7FC0
    if math.isinf(number) or number == 0:
        return sign | (0x7F80 if number else 0)
    exponent = max(math.frexp(number)[1], -125)  # subnormal below 2^-126
    steps = round(math.ldexp(abs(number), 8 - exponent))  # of 8 bits; Python rounds to even
    return sign | min(steps + (exponent + 125 << 7), 0x7F80)  # the 1 before the point adds 1 to the exponent


def gemv(x, weights, result):
    """y = x W with w = scale * (code - zero)."""
    fields = weights["fields"]
    columns, group_size = fields["columns"], dict(fields["options"])["group_size"]
    qweight, qzeros, scales = (read(tensor) for tensor in fields["tensors"])  # in the order of the format's table
    y = [0.0] * columns
    for k, x_k in enumerate(map(from_bfloat16, read(x))):
        group = k // group_size
        for n in range(columns):
            word, shift = n // 8, 4 * PLACES[n % 8]
            code = qweight[k * columns // 8 + word] >> shift & 15
            zero = qzeros[group * columns // 8 + word] >> shift & 15
            y[n] += x_k * (scales[group * columns + n] * (code - zero))
    data = struct.pack(f"<{columns}H", *map(to_bfloat16, y))
    return {"array": "bfloat16", "shape": [columns], "data": base64.b64encode(data).decode()}


for line in sys.stdin:  # until it is closed
    request = json.loads(line)
    reply = {"id": request["id"]}
    try:
        reply["result"] = CAPABILITIES if request["do"] == "capabilities" else gemv(**request["arguments"])
    except Exception as error:
        reply["error"] = {"kind": "failed", "message": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
