"""lowbit: the executable specification of low-bit LLM inference.

Read the chapters in this order: `packing`, `affine`, `linear`, then `contract`, `rounding` and `backend` for what a
kernel must keep to, then `rope`, `attention`, `decoder`, `perplexity` and `formats.gguf` for a whole model.
"""

__version__ = "0.1.0"
