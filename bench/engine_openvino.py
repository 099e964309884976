"""OpenVINO GenAI as an engine."""

import time

import numpy as np
import openvino
import openvino_genai
from engines import Continued, Generator, Setting


class OpenVino(Generator):
    """It reads the GGUF file itself. By default it casts activations to 8 bits and computes in bfloat16 where the
    processor has it; with ``exact`` it does neither."""

    def __init__(self, setting: Setting, exact: bool) -> None:
        plain = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
        settings = {"INFERENCE_NUM_THREADS": setting.threads, "CACHE_DIR": ""} | (plain if exact else {})
        # Its other way of attention keeps the prompts that it has read, and here the same prompt comes again.
        self._pipeline = openvino_genai.LLMPipeline(str(setting.file), "CPU", ATTENTION_BACKEND="SDPA", **settings)

    def continued(self, prompt: list[int], count: int) -> Continued:
        settings = openvino_genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True)
        settings.do_sample, settings.apply_chat_template = False, False
        given = openvino.Tensor(np.array([prompt], np.int64))
        times = []
        going_on = openvino_genai.StreamingStatus.RUNNING

        class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]  # of a library without types
            def write(self, token: object) -> object:
                times.append(time.perf_counter())
                return going_on

            def end(self) -> None: ...

        start = time.perf_counter()
        found = self._pipeline.generate(given, settings, Clock())
        return Continued(list(found.tokens[0]), times[0] - start, times[-1] - times[0])
