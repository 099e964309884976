"""Where tests find the repository, and what they share."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Modules and sources that tests share. Programs that a test starts find backends such as `odd_backends` here."""

ROOT = SUPPORT.parents[2]
"""The repository."""
