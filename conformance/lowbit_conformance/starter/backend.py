"""my-backend: a backend for lowbit.

It declares one operation, `packing.unpack`, for codes of 4 bits. What a backend does not declare is not tested; what
it declares must be right. ``lowbit conformance my-backend`` says whether it is.
"""

import numpy as np

from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.quantization.packing import Codes, Words

CODES_PER_WORD = 8


class MyBackend(Backend):
    """A backend has a name, its capabilities, and for each operation a method, which is called its *hook*."""

    name = "my-backend"

    def capabilities(self) -> Capabilities:
        """Declares one operation, with `bits` limited to 4."""
        return Capabilities({"packing.unpack": Declaration({"bits": (4,)})})

    def _packing_unpack(self, words: Words, bits: int) -> Codes:
        """Code k of a column is bits 4·k to 4·k + 3 of the column, least significant first.

        The arguments have been checked: `words` is uint32, K/8 × N, contiguous, and `bits` is 4.
        """
        shifts = 4 * np.arange(CODES_PER_WORD, dtype=np.uint32)
        codes = words[:, np.newaxis, :] >> shifts[:, np.newaxis] & 15  # K/8 × 8 × N
        return codes.astype(np.uint8).reshape(-1, words.shape[1])

    # Next steps. Run `lowbit conformance my-backend` after each; the tutorial in lowbit's documentation takes the same
    # steps.
    #
    # 1. Declare more of this operation: {"bits": (2, 4, 8)}, or Declaration() for all widths.
    # 2. Declare another operation. The hook of `packing.pack` is _packing_pack(self, codes, bits): a hook has the name
    #    of its operation and takes the arguments of the reference function.
    # 3. Claim a profile: Capabilities({...}, profiles=("lowbit-1.1/packing",)). `lowbit profiles` lists the profiles.
    # 4. Multiply. Declare "linear.qgemv" with your arithmetic, Declaration({"bits": (4,)}, Arithmetic("dequantised")),
    #    with Arithmetic from lowbit.contract.rounding, and return a lowbit.backend.PreparedLinear from
    #    _prepare(self, matrix).
    #
    # Compute every result in this package. Calling a function of lowbit that computes, or importing another backend, is
    # a breach (SILENT_FALLBACK), whatever the purpose. You may use the types, constants, checks and errors of lowbit.
