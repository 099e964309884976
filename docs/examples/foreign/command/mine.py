"""A backend that answers line by line, in plain Python: no numpy, and nothing of lowbit.

    lowbit conformance --command 'python mine.py'

Any language that reads a line of JSON and writes one can do the same.
"""

import base64
import itertools
import json
import math
import struct
import sys

FORMATS = {"|u1": "B", "<u4": "I", "<f4": "f"}  # of the elements of arrays, as the module `struct` calls them

CAPABILITIES = {
    "name": "mine-command",
    "version": "1.0",
    "prepare": True,
    "operations": {
        "packing.pack": {},
        "packing.unpack": {},
        "linear.qgemv": {
            "limits": {"bits": [4], "convention": ["minimum"], "scale_dtype": ["float32"]},
            "arithmetic": {"form": "dequantised", "accumulator": "float64", "roundings": "any_order"},
        },
    },
}


def read(array):
    """The elements of an array, row after row."""
    data = base64.b64decode(array["data"])
    kind = FORMATS[array["array"]]
    return struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)


def write(kind, shape, elements):
    """An array."""
    data = struct.pack(f"<{len(elements)}{FORMATS[kind]}", *elements)
    return {"array": kind, "shape": shape, "data": base64.b64encode(data).decode()}


def pack(codes, bits):
    """Codes to words. Each column is one long integer: code k is its bits from bits * k on."""
    rows, columns = codes["shape"]
    elements = read(codes)
    streams = [sum(elements[k * columns + n] << bits * k for k in range(rows)) for n in range(columns)]
    words = [stream >> 32 * word & 0xFFFFFFFF for word in range(rows * bits // 32) for stream in streams]
    return write("<u4", [rows * bits // 32, columns], words)


def unpack(words, bits):
    """Words to codes, the other way."""
    rows = rows_of_codes(words, bits)
    return write("|u1", [len(rows), len(rows[0])], [code for row in rows for code in row])


def rows_of_codes(words, bits):
    """The codes in words, one list a row."""
    word_rows, columns = words["shape"]
    elements = read(words)
    streams = [sum(elements[word * columns + n] << 32 * word for word in range(word_rows)) for n in range(columns)]
    return [[stream >> bits * k & (1 << bits) - 1 for stream in streams] for k in range(word_rows * 32 // bits)]


prepared = {}  # what the handles that were given out stand for
handles = itertools.count()


def prepare(matrix):
    """Keep the weights of a matrix, scale * code + minimum, each operation rounded as float32 is."""
    fields = matrix["fields"]
    columns, group_size = fields["words"]["shape"][1], fields["group_size"]
    scales, minima = read(fields["scales"]), read(fields["zeros"])
    weights = []
    for k, codes in enumerate(rows_of_codes(fields["words"], fields["bits"])):
        group = slice(k // group_size * columns, (k // group_size + 1) * columns)
        triples = zip(scales[group], codes, minima[group], strict=True)
        weights.append([float32(float32(scale * code) + minimum) for scale, code, minimum in triples])
    handle = next(handles)
    prepared[handle] = weights
    return handle


def qgemv(x, handle):
    """y = x W, added up in float64, which is what a float is in Python."""
    weights = prepared[handle]
    y = [0.0] * len(weights[0])
    for x_k, row in zip(read(x), weights, strict=True):
        y = [total + x_k * weight for total, weight in zip(y, row, strict=True)]
    return write("<f4", [len(y)], [float32(total) for total in y])


def float32(number):
    """The nearest float32; beyond the largest, infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


OPERATIONS = {"packing.pack": pack, "packing.unpack": unpack}


def answer(do, operation=None, arguments=None, handle=None):
    """The result of one request."""
    if do == "capabilities":
        return CAPABILITIES
    if do == "prepare":
        return prepare(**arguments)
    if do == "release":
        del prepared[handle]
        return None
    if do == "run" and operation == "linear.qgemv":
        return qgemv(arguments["x"], handle)
    return OPERATIONS[operation](**arguments)


for line in sys.stdin:  # until it is closed
    request = json.loads(line)
    reply = {"id": request.pop("id")}
    del request["lowbit"]  # the version of the protocol, 1
    try:
        reply["result"] = answer(**request)
    except Exception as error:
        reply["error"] = {"kind": "failed", "message": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
