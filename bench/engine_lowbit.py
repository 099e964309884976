"""lowbit as an engine: `lowbit generate --backend cppyy`."""

import time
from collections.abc import Iterator
from typing import Any

from engines import Setting, Stepwise

from lowbit.model.generation import follow_batch
from lowbit.model.perplexity import perplexity
from lowbit.model.quantization_plan import Plan
from lowbit.model.sampling import GREEDY
from lowbit.runtime import Contract, Options, load
from lowbit.runtime.options import StepChoice
from lowbit_cppyy.backend import CppyyBackend


class Lowbit(Stepwise):
    """With a step that is compiled, or operation by operation; and by one of the contracts of linear layers."""

    def __init__(
        self,
        setting: Setting,
        isa: str | None,
        contract: Contract,
        step: StepChoice,
        plan: tuple[int, int] | None = None,
    ) -> None:
        """`plan`: bits and group size to which the matrices of the blocks are quantised first; None for none."""
        backend = CppyyBackend(isa=isa, threads=setting.threads)
        asked = None if plan is None else Plan.uniform(*plan)
        self.model = load(setting.file, backend, Options(asked, contract, step))

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        return (step.token for step in self.model.generate(prompt, count, stop=()))

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        decoder: Any = self.model.decoder
        states = [decoder.new_state(len(each) + count) for each in prompts]
        ends = [decoder.logits(decoder.hidden(each, state)[-1:]) for each, state in zip(prompts, states, strict=True)]
        tokens = [int(each[0].argmax()) for each in ends]
        places, left = [(0, number) for number in range(len(states))], count  # the likeliest token needs no position
        start = time.perf_counter()
        while left:
            chosen = follow_batch(decoder, tokens, states, GREEDY, places, left)
            tokens, left = list(chosen[-1]), left - len(chosen)
        return time.perf_counter() - start

    def nats(self, window: list[int]) -> float:
        return perplexity(self.model.decoder, window, len(window)).nll
