"""ONNX Runtime GenAI as an engine.

It reads no GGUF file: its model builder makes a directory of the same model, of floats that ``lowbit convert --format
floats`` writes, and quantises them to 4 bits by its own rounding. So its tokens are those of other weights::

    lowbit convert FILE --out floats --format floats
    python -m onnxruntime_genai.models.builder -i floats -o onnx -p int4 -e cpu -c cache

The builder needs onnx_ir and transformers besides.
"""

import json
from collections.abc import Iterator

import onnxruntime_genai
from engines import Continued, Generator, Setting, timed


class OnnxRuntime(Generator):
    """A directory that the model builder has made. Its batches have prompts of one length, so it takes part alone."""

    def __init__(self, setting: Setting) -> None:
        if setting.onnx is None:
            raise OSError("it needs the model in its own format: give its directory to --onnx")
        config = onnxruntime_genai.Config(str(setting.onnx))
        config.clear_providers()
        session = {"intra_op_num_threads": setting.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)

    def continued(self, prompt: list[int], count: int) -> Continued:
        return timed(self._tokens(prompt, count))

    def _tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        params, length = onnxruntime_genai.GeneratorParams(self._model), len(prompt) + count
        params.set_search_options(do_sample=False, min_length=length, max_length=length)
        generator = onnxruntime_genai.Generator(self._model, params)
        generator.append_tokens([prompt])
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])
