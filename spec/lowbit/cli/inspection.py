"""``lowbit inspect``: what a model file holds, and what each backend would run natively.

The JSON answer is one object. A number that the file does not say is ``null``.

===================================== =================================================================================
field                                 holds
===================================== =================================================================================
``kind``, ``path``, ``file_bytes``    the kind of file, the path as it was given, and the size of all files with weights
``architecture``, ``runs``            what the file names, and whether lowbit runs it here
``reason``, ``next_step``             if not, the reader's sentence, and what to do; else ``null``
``shape``, ``tokenizer``              numbers by name; kind, and whether there is a chat template
``parameters``, ``bytes``             of all tensors, with ``bits_per_weight``
``parts``                             the same for each part and storage type, with the number of tensors
``quantization``                      of a checkpoint: method, label, bits, group size, the number of matrices in each
                                      format, and what the zeros of GPTQ say
``backends``                          by name: for each type of matrix and each contract, how many are multiplied as
                                      they are stored, and what is lacking for the others; a sentence of advice
===================================== =================================================================================
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from lowbit.backend.asking import Description
from lowbit.cli.backends import chosen, descriptions
from lowbit.cli.options import JsonOption
from lowbit.quantization.packing import BITS
from lowbit.runtime.inspection import Held, Inspection, Matrices, Quantisation
from lowbit.runtime.inspection import inspect as inspected
from lowbit.runtime.linears import CONTRACTS, FLOATS, Contract
from lowbit.runtime.native import NO_INTEGERS, UNDESCRIBED, Products, advice, products
from lowbit.tensor_formats import dense
from lowbit.tensor_formats.stored import FORMATS
from lowbit.text import one_line, shortened

WIDTH = 80
LABEL, TYPE, BACKEND = 12, 16, 20
"""The widths of a label, a storage type, and the name of a backend, in columns."""
NATIVE, DEQUANTISED, FLOAT32, UNKNOWN, REFUSED = "native", "dequantised", "float32", "unknown", "refused"
MEANINGS = {
    NATIVE: "multiplied as it is stored",
    DEQUANTISED: "made float32 first, which is slow and takes 4 bytes for each weight",
    FLOAT32: "not quantised, and multiplied in float32",
    UNKNOWN: "in no format of lowbit",
    REFUSED: "the backend has no --contract integer",
}
"""How a backend treats matrices, in a word and in a phrase."""
SHORT = {FLOATS: FLOAT32, UNDESCRIBED: UNKNOWN, NO_INTEGERS: REFUSED}
"""Reasons that have a word of their own."""
SHAPE = {
    "layers": "layers",
    "hidden": "hidden",
    "feed_forward": "feed-forward",
    "heads": "heads",
    "kv_heads": "KV heads",
    "head_dim": "head_dim",
    "experts": "experts",
    "top_k": "top-k",
    "vocabulary": "vocabulary",
    "context": "context",
}


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A GGUF file, a safetensors file, or a directory with config.json and safetensors."
        ),
    ],
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", help="Only this backend; may be given several times. By default all installed ones."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a model file, and what each backend would run natively, without reading weights."""
    asked = chosen(backends)
    found = inspected(path)
    if as_json:
        print(json.dumps({"path": str(path), **described(found), "backends": _described(found, descriptions(asked))}))
        return
    print("\n".join(told(found)), flush=True)  # querying backends takes seconds
    print("\n".join(_told_backends(found, descriptions(asked))))


# **For programs.**


def described(found: Inspection) -> dict[str, object]:
    """A model for a JSON answer, without the backends."""
    total, tokenizer = found.total, found.tokenizer
    return {
        "kind": found.kind,
        "file_bytes": found.file_bytes,
        "architecture": found.architecture,
        "runs": not found.problem,
        "reason": found.problem or None,
        "shape": dict(found.shape),
        "tokenizer": None if tokenizer is None else {"kind": tokenizer.kind, "chat_template": tokenizer.chat_template},
        "parameters": total.parameters,
        "bytes": total.nbytes,
        "bits_per_weight": total.bits_per_weight,
        "parts": [_described_row(row) for row in found.rows],
        "quantization": None if found.quantisation is None else _described_method(found.quantisation),
        "next_step": next_step(found),
    }


def _described_row(row: Held) -> dict[str, object]:
    numbers = {"tensors": row.tensors, "parameters": row.parameters, "bytes": row.nbytes}
    return {"part": row.part, "type": row.type, **numbers, "bits_per_weight": row.bits_per_weight}


def _described_method(quantisation: Quantisation) -> dict[str, object]:
    zeros = quantisation.zeros
    return {
        "method": quantisation.method.name,
        "label": quantisation.method.label or None,
        "bits": quantisation.bits,
        "group_size": quantisation.group_size,
        "formats": {name: count for name, count in quantisation.formats.items() if name},
        "without_format": quantisation.formats.get("", 0),
        "zeros": None
        if zeros is None
        else {
            "sampled": list(zeros.sampled),
            "value": zeros.value,
            "version": zeros.version or None,
            "label": zeros.labelled,
        },
    }


def _described(found: Inspection, answers: Mapping[str, Description]) -> dict[str, object]:
    """How each backend treats the matrices, for a JSON answer."""
    rows = _products(found, answers)
    answer: dict[str, object] = {}
    for name, description in answers.items():
        if name not in rows:
            answer[name] = description
            continue
        matrices = [
            {
                "type": each.type,
                "matrices": each.matrices,
                **{
                    contract: {"native": each.native[contract], "lacking": dict(each.lacking[contract])}
                    for contract in CONTRACTS
                },
            }
            for each in rows[name]
        ]
        told = advice(name, rows, description["operations"], runs=not found.problem)
        answer[name] = {"usable": True, "matrices": matrices, "advice": told}
    return answer


def _products(found: Inspection, answers: Mapping[str, Description]) -> dict[str, list[Products]]:
    """How each usable backend treats the matrices. If lowbit does not run the model, only the kernels count."""
    return {
        name: products(
            each["operations"], found.matrices, prepares_stored=each["prepares_stored"] or bool(found.problem)
        )
        for name, each in answers.items()
        if each["usable"]
    }


# **For people.**


def told(found: Inspection) -> list[str]:
    """A model for people, in lines of at most `WIDTH` columns."""
    lines = _labelled("model", f"{found.name}, {found.kind}, {found.file_bytes:,} bytes")
    how = f"lowbit does not run it: {found.problem}" if found.problem else "lowbit runs it"
    lines += _labelled("architecture", f"{found.architecture or 'not named'}; {how}")
    shape = [f"{label} {number:,}" for name, label in SHAPE.items() if (number := found.shape.get(name)) is not None]
    lines += _labelled("shape", ", ".join(shape) or "not given")
    lines += _labelled("tokenizer", _told_tokenizer(found))
    if found.quantisation is not None:
        lines += _told_method(found.quantisation)
    if (step := next_step(found)) is not None:
        lines += _labelled("next step", step)
    return [*lines, "", *_told_rows(found)]


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        initial_indent=f"{label:{LABEL}} ",
        subsequent_indent=" " * (LABEL + 1),
        break_on_hyphens=False,  # a command is copied from here
    )


def _told_tokenizer(found: Inspection) -> str:
    if found.tokenizer is None:
        return "none"
    return f"{found.tokenizer.kind}, {'with a' if found.tokenizer.chat_template else 'without a'} chat template"


def _told_method(quantisation: Quantisation) -> list[str]:
    method = quantisation.method
    said = [method.name]
    said += [f"{quantisation.bits} bits"] if quantisation.bits is not None else []
    if quantisation.group_size is not None:
        said += ["one group a row" if quantisation.group_size == -1 else f"groups of {quantisation.group_size}"]
    said += [f"labelled {method.label}"] if method.label else []
    lines = _labelled("quantised", ", ".join(said))
    for name, count in quantisation.formats.items():
        what = f"{name} ({FORMATS[name].title})" if name else "no format of lowbit.tensor_formats"
        lines += _labelled("format", f"{count:,} matri{'x' if count == 1 else 'ces'}: {what}")
    return lines + (_labelled("zeros", quantisation.zeros.sentence) if quantisation.zeros is not None else [])


def next_step(found: Inspection) -> str | None:
    """What to do with a model that lowbit does not run; None if it runs, or if nothing is known to help."""
    if not found.problem:
        return None
    if found.remedy:
        return found.remedy
    formats = [name for each in found.matrices if (name := _format_of(each))]
    if found.quantisation is not None:
        again = f" and --bits {bits}" if (bits := found.quantisation.bits) in BITS else ""
        read = (
            f"lowbit.tensor_formats.stored.stored('{formats[0]}', ...) reads one of its matrices. " if formats else ""
        )
        return f"{read}To run the model, use the one that it was quantised from{again}."
    if formats:
        tested = f"lowbit conformance --function module:gemv --operation linear.gemv --format {formats[0]}"
        return f"Kernels for its matrices can be tested without the model: {tested}"
    return None


def _format_of(matrices: Matrices) -> str:
    """The format of matrices; empty for floats and for bytes that no chapter describes."""
    if matrices.choices is None or matrices.choices.get("format") in dense.NAMES:
        return ""
    return str(matrices.choices.get("format", matrices.type.lower()))  # GGUF's affine groupings are formats as well


def _told_rows(found: Inspection) -> Iterator[str]:
    yield f"{'part':{LABEL}} {'type':{TYPE}} {'tensors':>7} {'parameters':>14} {'bytes':>15} {'bits/weight':>11}"
    for row in (*found.rows, found.total):
        bits = "" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}"
        left = f"{row.part:{LABEL}} {_type(row.type)} {row.tensors:>7,} {row.parameters:>14,} {row.nbytes:>15,}"
        yield f"{left} {bits:>11}".rstrip()


def _type(name: str) -> str:
    """A storage type in its column; the name of a method comes from a file."""
    return f"{shortened(one_line(name), TYPE):{TYPE}}"


def _told_backends(found: Inspection, answers: Mapping[str, Description]) -> Iterator[str]:
    rows = _products(found, answers)
    yield ""
    yield f"{'backend':{BACKEND}} {'matrices of type':{TYPE}} {'number':>7}  {'in float32':15} in integers"
    for name, of_backend in rows.items():
        shown = one_line(name)
        if len(shown) > BACKEND:
            yield shown
            shown = ""
        for number, each in enumerate(of_backend):
            left = f"{'' if number else shown:{BACKEND}} {_type(each.type)} {each.matrices:>7,}"
            yield f"{left}  {_cell(each, 'float32'):15} {_cell(each, 'integer')}"
        said = advice(name, rows, answers[name]["operations"], runs=not found.problem)
        indent = " " * (BACKEND + 1)
        yield from textwrap.wrap(one_line(said), WIDTH, initial_indent=indent, subsequent_indent=indent)
    cells = {_cell(each, contract) for found in rows.values() for each in found for contract in CONTRACTS}
    legend = [f"{word}: {meaning}." for word, meaning in MEANINGS.items() if word in cells]
    legend += ["Backends that cannot run here are left out: `lowbit backends` says why."] * (len(rows) < len(answers))
    yield from ["", *textwrap.wrap(" ".join(legend), WIDTH)]


def _cell(found: Products, contract: Contract) -> str:
    """How a backend treats the matrices of a type, in two words."""
    native, reasons = found.native[contract], found.lacking[contract]
    if not reasons:
        return NATIVE
    if native:
        return f"{native:,} {NATIVE}"
    return next((short for reason, short in SHORT.items() if reason in reasons), DEQUANTISED)
