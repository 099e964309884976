"""``python -m lowbit_foreign``: the folder of ``lowbit.h``."""

from lowbit_foreign import INCLUDE

print(INCLUDE)
