"""A real GGUF file on one of our backends and in transformers: every product on its own inputs, and the logits.

    python bench/experiments/logits.py FILE.gguf --backend cppyy --json docs/data/logits.json

Needs lowbit[cppyy], and transformers, torch and accelerate. Transformers turns every matrix into float32 with the
``gguf`` package and multiplies in float32; the backend reads the stored bytes. Two questions are asked:

* Each matrix multiplies the inputs that it has in transformers, once here and once there. Both results are within their
  bounds of the exact product, so they differ by at most the sum of the two bounds. The largest share of that sum is
  shown for each format; a share above 1 is an error of one of them.
* The logits after each token of a text are compared. Errors of one layer pass through all that follow, for which no
  useful bound exists, so this is only measured: the largest difference, in standard deviations of the logits, and
  whether the likeliest token is the same.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import lowbit
from lowbit.arrays import F32, F64
from lowbit.backend import Backend
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.linear.stored_bounds import stored_bound
from lowbit.system.storage import write_whole
from lowbit.tensor_formats.stored import FORMATS, Stored

TEXT = "The history of the steam engine began long before anyone had a name for it. In the year"
MOST_COLUMNS = 4096  # of a matrix: the exact product is made in float64
TORCH = Arithmetic("dequantised", "float32", any_order, weights="float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--backend", default="cppyy")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = {file.name: compared(file, options.backend, options.text) for file in options.files}
    if options.json:
        packages = ("transformers", "torch", "gguf", "lowbit")
        facts = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "packages": {name: version(name) for name in packages}}
        write_whole(options.json, json.dumps(facts | {"text": options.text, "files": found}, indent=1).encode())


def compared(file: Path, backend: str, text: str) -> dict[str, Any]:
    """Both comparisons for one file, printed as they are made."""
    model = lowbit.load_model(str(file), backend=backend)
    tokens = [int(token) for token in model.tokens_of(text)]
    peer = Peer(file)
    print(f"{file.name}: {len(tokens)} tokens, {backend} and transformers")
    products = of_products(file, lowbit.load_backend(backend), peer, tokens)
    for format, row in products.items():
        said = f"{row['matrices']:>3} matrices, {row['elements']:,} elements"
        print(f"  {format:10} {said}: at most {row['share']:.3f} of the sum of both bounds")
    logits = of_logits([model.logits(tokens[: n + 1]) for n in range(len(tokens))], peer.logits(tokens))
    print("  logits: largest difference {largest:.2e}, standard deviation {deviation:.3f};".format(**logits))
    print("  the likeliest token is the same after {agreeing} of {tokens} tokens".format(**logits))
    return {"backend": backend, "products": products, "logits": logits}


class Peer:
    """The model in transformers, in float32."""

    def __init__(self, file: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()

    def logits(self, tokens: list[int]) -> F32:
        """tokens × vocabulary."""
        with self._torch.no_grad():
            found: F32 = self.model(self._torch.tensor([tokens])).logits[0].numpy()
        return found

    @contextmanager
    def watching(self, take: Callable[[str, F32, F32], None]) -> Iterator[None]:
        """While it runs, take the name, the inputs T × K and the product T × N, without bias, of each matrix."""

        def hook(name: str) -> Callable[[Any, Any, Any], None]:
            def noted(module: Any, inputs: Any, output: Any) -> None:
                x = inputs[0].reshape(-1, module.in_features)
                take(name, x.numpy(), self._torch.nn.functional.linear(x, module.weight).numpy())

            return noted

        linears = [each for each in self.model.named_modules() if isinstance(each[1], self._torch.nn.Linear)]
        handles = [module.register_forward_hook(hook(name)) for name, module in linears]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def of_products(file: Path, backend: Backend, peer: Peer, tokens: list[int]) -> dict[str, dict[str, Any]]:
    """By format the matrices, the elements that were compared, and the largest share of the sum of both bounds."""
    reader = gguf.GGUFReader(file)
    tensors, rows = {each.name: each for each in reader.tensors}, dict[str, dict[str, Any]]()
    names = gguf.get_tensor_name_map(architecture_of(reader), peer.model.config.num_hidden_layers)
    declared = backend.capabilities().operations["linear.gemm"].arithmetic
    assert declared is not None

    def take(name: str, x: F32, theirs: F32) -> None:
        own = names.get_name(name) or ""
        tensor = tensors.get(f"{own}.weight") or tensors["token_embd.weight"]  # the head may be the embedding
        weights = stored(tensor)
        ours, wide = backend.prepare_stored(weights).gemm(x), x.astype(np.float64)
        exact = wide @ weights.values
        bounds = [stored_bound(wide, weights, "float32", each, exact) for each in (declared, TORCH)]
        share = np.abs(ours - theirs[:, : weights.columns].astype(np.float64)) / (bounds[0].limit + bounds[1].limit)
        row = rows.setdefault(weights.format, {"matrices": 0, "elements": 0, "share": 0.0})
        row["matrices"] += 1
        row["elements"] += share.size
        row["share"] = max(row["share"], float(share.max()))

    with peer.watching(take):
        peer.logits(tokens)
    return rows


def architecture_of(reader: gguf.GGUFReader) -> gguf.MODEL_ARCH:
    """The architecture that the file names."""
    name = reader.fields["general.architecture"].contents()
    return next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def stored(tensor: gguf.ReaderTensor) -> Stored:
    """The bytes of a tensor, of its first columns, as a matrix K × N."""
    data, name = np.ascontiguousarray(tensor.data[:MOST_COLUMNS]), tensor.tensor_type.name.lower()
    return Stored(name if name in FORMATS else f"gguf-{name}", int(tensor.shape[0]), len(data), (data,))


def of_logits(ours: list[F32], theirs: F32) -> dict[str, Any]:
    """What differs between the logits after each token."""
    mine: F64 = np.array(ours, np.float64)
    return {
        "tokens": len(mine),
        "largest": float(np.abs(mine - theirs).max()),
        "deviation": float(theirs.std()),
        "agreeing": int((mine.argmax(axis=1) == theirs.argmax(axis=1)).sum()),
    }


if __name__ == "__main__":
    main()
