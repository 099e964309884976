"""Isolation: the process that owns the backend under test, and everything between it and the judge."""
