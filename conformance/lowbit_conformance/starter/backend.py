"""my-backend: a backend for lowbit.

It declares one operation, `packing.unpack`, for codes of 4 bits. What a backend does not declare is not tested; what
it declares must hold. ``lowbit conformance my-backend`` says whether it does.
"""

import numpy as np

from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.quantization.packing import Codes, Words

CODES_PER_WORD = 8


class MyBackend(Backend):
    """A name, what is claimed, and a method for each operation: its *hook*."""

    name = "my-backend"

    def capabilities(self) -> Capabilities:
        """One operation; of its parameter `bits`, the value 4 only."""
        return Capabilities({"packing.unpack": Declaration({"bits": (4,)})})

    def _packing_unpack(self, words: Words, bits: int) -> Codes:
        """Code k of a column is bits 4·k to 4·k + 3 of the column, least significant first.

        Arguments were checked before: words is uint32, K/8 × N, contiguous, and bits is 4.
        """
        shifts = 4 * np.arange(CODES_PER_WORD, dtype=np.uint32)
        codes = words[:, np.newaxis, :] >> shifts[:, np.newaxis] & 15  # K/8 × 8 × N
        return codes.astype(np.uint8).reshape(-1, words.shape[1])

    # What to do next, with `lowbit conformance my-backend` after each step; the tutorial in lowbit's documentation
    # goes the same way.
    #
    # 1. Declare more of this operation: {"bits": (2, 4, 8)}; without a limit, Declaration(), it is all of it.
    # 2. Declare another. The hook of `packing.pack` is _packing_pack(self, codes, bits): an operation's hook has its
    #    name and the arguments of its reference function.
    # 3. Claim a profile: Capabilities({...}, profiles=("lowbit-1.1/packing",)); `lowbit profiles` lists them.
    # 4. Multiply. Declare "linear.qgemv" with your arithmetic, Declaration({"bits": (4,)}, Arithmetic("dequantised"))
    #    from lowbit.contract.rounding, and answer with a lowbit.backend.PreparedLinear from _prepare(self, matrix).
    #
    # Compute every result here. A call of a function of lowbit that computes, and the import of another backend, are
    # breaches (SILENT_FALLBACK), whatever they are for. Types, constants, checks and errors of lowbit are for everyone.
