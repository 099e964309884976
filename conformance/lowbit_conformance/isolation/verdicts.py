"""The error that carries a verdict on the way a call was made."""


class BrokenPromiseError(AssertionError):
    """A verdict on the way a call was made rather than on its result; the first word of its text is the verdict."""
