"""The commands ``lowbit kernel`` and ``lowbit tune``."""
