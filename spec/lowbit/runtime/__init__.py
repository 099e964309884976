"""Running a model: one way from a file to tokens, for any model and any backend.

`load` takes a GGUF file, a checkpoint directory or weights in memory, and a backend, and returns a `LanguageModel`. It
generates tokens, computes logits and measures perplexity, and its account says what was run. The backend may multiply
one matrix at a time or run whole models on a device.

`inspect` describes a file without reading weights.
"""

from lowbit.formats.fetch import Report
from lowbit.runtime.inspection import Inspection, inspect
from lowbit.runtime.language_model import LanguageModel, load
from lowbit.runtime.linears import CONTRACTS, BackendLinears, Contract
from lowbit.runtime.options import Options
from lowbit.runtime.placement import Account
from lowbit.runtime.stored import StoredModel, open_model

__all__ = [
    "CONTRACTS",
    "Account",
    "BackendLinears",
    "Contract",
    "Inspection",
    "LanguageModel",
    "Options",
    "Report",
    "StoredModel",
    "inspect",
    "load",
    "open_model",
]
