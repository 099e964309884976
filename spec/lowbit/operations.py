"""All operations of the specification: importing this imports every chapter that declares one.

>>> sorted(OPERATIONS)[:2]
['affine.dequantize', 'affine.quantize']
"""

from lowbit import affine, linear, packing
from lowbit.contract import OPERATIONS

__all__ = ["OPERATIONS", "affine", "linear", "packing"]
