"""``python -m lowbit.cli`` is ``lowbit``."""

from lowbit.__main__ import main

main()
