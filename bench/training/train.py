"""Train one of the small models: under an hour each on two cores.

    cd bench
    python -m training.train mixtral             # writes mixtral/model and mixtral/training.json
    python -m training.train mixtral --resume    # go on where Ctrl-C, or a crash, ended it
    python -m training.train dense --steps 20 --out /tmp/try    # see it work

Bytes are the tokens. The texts are of the Canterbury corpus (the chapter `lowbit.formats.fetch` fetches them); the last
tenth of each is kept from training, and validation, perplexities and recorded routings use nothing else. On one
machine, with one number of threads and one version of torch, two runs give the same weights; which of these they were
is written beside them. Needs torch and safetensors (the dependency group `torch` of pyproject.toml).
"""

import argparse
import math
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from machine import description
from torch.nn import functional

from lowbit.system.storage import written
from training.files import write_json
from training.models import BENCH, MODELS, Shape
from training.network import Parameters, Tensor, forward, new_parameters
from training.texts import split
from training.writing import write_model

BALANCE, DECAY, CLIP, WARMUP, FLOOR = 0.01, 0.1, 1.0, 100, 0.05
LONG_FROM = 0.85  # of the steps; from then on sequences are as long as the model's context
EVERY = 25  # steps between two lines of progress
SAVED_EVERY = 200


def main() -> None:
    """Train, validate, write."""
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    run = Run(MODELS[options.model].shape, options)
    if options.resume:
        run.restore()
    with interrupts() as interrupted:
        while run.step < options.steps:
            run.advance()
            if interrupted or run.step % SAVED_EVERY == 0:
                run.save()
            if interrupted:
                sys.exit(f"\nstopped after step {run.step}; --resume goes on from {options.checkpoint}")
        run.save()
    finish(run, options)


class Run:
    """Parameters, optimiser and what has been seen so far.

    The data of a step is drawn from (seed, step) alone, so a run that was interrupted goes on as if it had not been.
    """

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        self.shape, self.options = shape, options
        self.parameters = new_parameters(shape, options.seed)
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=True)
        self.texts = [split(name)[0] for name in MODELS[options.model].texts]
        self.step, self.seconds, self.curve = 0, 0.0, list[dict[str, float]]()
        self._recent: list[float] = []

    def advance(self) -> None:
        """One step, and now and then a line about it."""
        began = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        tokens = self.batch()
        answer = forward(self.parameters, self.shape, tokens[:, :-1])
        loss = functional.cross_entropy(answer.logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        (loss + BALANCE * answer.balance).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - began
        self._recent.append(loss.item() / math.log(2))
        if self.step % EVERY == 0 or self.step == self.options.steps:
            self.report(answer.balance.item(), answer.shares)

    def batch(self) -> Tensor:
        """The bytes of this step: B × (S + 1), windows from anywhere in the texts."""
        long = self.step >= LONG_FROM * self.options.steps
        length = self.shape.max_position_embeddings if long else self.options.length
        rng = np.random.default_rng([self.options.seed, self.step])
        sizes = np.array([text.size for text in self.texts])
        rows = []
        for _ in range(self.options.tokens // length):
            text = self.texts[rng.choice(len(sizes), p=sizes / sizes.sum())]
            start = int(rng.integers(text.size - length))
            rows.append(text[start : start + length + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def rate(self) -> float:
        """Linear warm-up, then a cosine down to a small part."""
        warm = min(1.0, (self.step + 1) / min(WARMUP, self.options.steps))
        cosine = (1 + math.cos(math.pi * self.step / self.options.steps)) / 2
        rate: float = self.options.rate * warm * (FLOOR + (1 - FLOOR) * cosine)
        return rate

    def report(self, balance: float, shares: Tensor) -> None:
        """One line: loss since the last, balance of the experts now, and the time left."""
        bits, self._recent = float(np.mean(self._recent)), []
        experts = ""
        if self.shape.sparse:
            least, most = (each.item() * self.shape.num_local_experts for each in (shares.min(), shares.max()))
            experts = f"balance {balance:.3f}  experts get {least:.2f} to {most:.2f} of an even share  "
        left = self.seconds / self.step * (self.options.steps - self.step)
        self.curve.append({"step": self.step, "bits": round(bits, 4), "balance": round(balance, 4)})
        print(
            f"step {self.step:5}/{self.options.steps}  {bits:.3f} bits a byte  {experts}{left / 60:.1f} min left",
            flush=True,
        )

    def save(self) -> None:
        """Everything that a resumed run needs, under a temporary name first."""
        target = Path(self.options.checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = {"parameters": self.parameters, "optimizer": self.optimizer.state_dict(), "settings": self.settings()}
        told = {"curve": self.curve, "recent": self._recent}
        with written(target) as stream:
            torch.save(kept | told | {"step": self.step, "seconds": self.seconds}, stream)

    def restore(self) -> None:
        """Go on from the checkpoint, if it is of the same run."""
        path = Path(self.options.checkpoint)
        if not path.is_file():
            sys.exit(f"--resume: no file {path}; allowed: what an interrupted run has written")
        try:
            kept = torch.load(path, weights_only=True)
            theirs = kept["settings"]
        except (RuntimeError, KeyError, OSError, EOFError, pickle.UnpicklingError):
            sys.exit(f"--resume: {path} is not whole; allowed: what an interrupted run has written")
        for name, value in self.settings().items():
            if theirs.get(name) != value:
                sys.exit(f"--resume: {path} is of a run with {name} {theirs.get(name)}; allowed: {value}")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(kept["parameters"][name])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.seconds, self.curve, self._recent = (
            kept[name] for name in ("step", "seconds", "curve", "recent")
        )

    def settings(self) -> dict[str, Any]:
        """What makes a run the run that it is."""
        names = ("seed", "steps", "tokens", "length", "rate")
        method = {"balance": BALANCE, "decay": DECAY, "clip": CLIP, "warmup": WARMUP, "floor": FLOOR}
        chosen = {name: getattr(self.options, name) for name in names}
        return chosen | self.shape.numbers() | method | {"long_from": LONG_FROM}


def finish(run: Run, options: argparse.Namespace) -> None:
    """Write the model in float16, validate what was written, and say how it was made."""
    rounded = {name: value.detach().half().float() for name, value in run.parameters.items()}
    texts = MODELS[options.model].texts
    bits = {name: validate(rounded, run.shape, split(name)[1]) for name in texts}
    shares = bits[texts[0]][1]
    out = Path(options.out)
    files = write_model(out / "model", run.parameters, run.shape, BALANCE)
    named = {name: round(value, 4) for name, (value, _) in bits.items()}
    write_json(
        out / "training.json",
        {
            "settings": run.settings(),
            "texts": list(texts),
            "validation_bits_per_byte": named,
            "validation_shares": {"of": texts[0], "layers": [[round(s, 4) for s in row] for row in shares.tolist()]},
            "seconds": round(run.seconds, 1),
            "threads": options.threads,
            "torch": torch.__version__,
            "machine": description(),
            "files": files,
            "curve": run.curve,
        },
    )
    print(f"validation {named} bits a byte; {run.seconds / 60:.1f} minutes; {out}")


def validate(parameters: Parameters, shape: Shape, text: np.ndarray[Any, Any]) -> tuple[float, Tensor]:
    """Bits per byte of a text read in windows of the model's context, each from nothing; and the experts' shares."""
    length = shape.max_position_embeddings
    count = (text.size - 1) // length
    total, shares = 0.0, []
    with torch.no_grad():
        for number in range(count):
            window = torch.from_numpy(text[number * length : (number + 1) * length + 1].astype(np.int64))[None]
            answer = forward(parameters, shape, window[:, :-1])
            total += functional.cross_entropy(answer.logits[0], window[0, 1:]).item() / math.log(2)
            shares.append(answer.shares)
    return total / count, torch.stack(shares).mean(dim=0)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C; the second Ctrl-C ends the program as usual."""
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small model.", allow_abbrev=False)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--steps", type=int, help="by default those of the model")
    parser.add_argument("--tokens", type=int, help="bytes of a step; by default those of the model")
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence, until the last steps")
    parser.add_argument("--rate", type=float, help="the highest learning rate; by default that of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--checkpoint", help="where an interrupted run is kept; by default in bench/results")
    parser.add_argument("--out", help="the folder that gets `model` and training.json")
    options = parser.parse_args()
    defaults(options)
    for name in ("steps", "tokens", "length", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; allowed: at least 1")
    if not 0 < options.rate < math.inf:
        parser.error(f"--rate is {options.rate}; allowed: a finite number above 0")
    context = MODELS[options.model].shape.max_position_embeddings
    if not options.length <= context <= options.tokens:
        given = f"--length is {options.length} and --tokens {options.tokens}"
        parser.error(f"{given}; allowed: length ≤ {context} ≤ tokens")
    return options


def defaults(options: argparse.Namespace) -> None:
    """What was not given, from the model."""
    model = MODELS[options.model]
    checkpoint = BENCH / f"results/{options.model}-training.pt"  # not in the repository
    found = {"steps": model.steps, "tokens": model.tokens, "rate": model.rate}
    for name, value in (found | {"checkpoint": str(checkpoint), "out": str(model.folder(options.seed))}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


if __name__ == "__main__":
    main()
