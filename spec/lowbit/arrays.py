"""Arrays: names for array types, by dtype.

A name says what each element is: ``F32`` is an array of float32, ``U8`` one of uint8. Chapters define further names
where the meaning of the numbers matters more than their dtype: `Codes`, `Words`, `Mantissas`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

# isort: split
import ml_dtypes  # after numpy, which its C code imports too: there an interrupt would become an ImportError

BF16 = npt.NDArray[ml_dtypes.bfloat16]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Activations = F32 | F16 | BF16
"""Numbers in one of the three types in which models compute."""
Array = npt.NDArray[Any]
"""An array of any dtype; the docstring says which are meant."""
