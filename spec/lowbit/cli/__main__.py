"""``python -m lowbit.cli`` is ``lowbit``."""

from lowbit.cli import main

main()
