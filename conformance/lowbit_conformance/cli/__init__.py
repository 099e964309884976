"""The commands ``lowbit conformance``, ``lowbit new-backend`` and ``lowbit vectors``."""
