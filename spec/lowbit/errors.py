"""The errors that lowbit raises on purpose.

Each of them is a `LowbitError`, fits on one line, and says three things: which argument or field is wrong, what was
given, and what is allowed. Any other exception that lowbit raises is a defect of lowbit.

**Sentence and fields.** The parts of an error are attributes, for programs. The sentence is made from them, as in "bits
is 5; allowed: 2, 3, 4 or 8" or "id is missing; it must be a string". Where that would not be a sentence, the error has
its own sentence and keeps its fields.

Parts of these sentences often come from files and backends. So control characters and line breaks are removed from them
before they are shown (`lowbit.text`).
"""

from lowbit.text import one_line, shortened

MOST_GIVEN = 120


def on_one_line(given: object) -> str:
    """What was given, without line breaks and not longer than a line.

    >>> on_one_line("a\\nb")
    'a b'
    """
    return shortened(one_line(" ".join(str(given).split())), MOST_GIVEN)


def _said(name: str, given: object, allowed: str) -> str:
    """A sentence of the three parts. What is missing, or is there and should not be, has no value to show."""
    if isinstance(given, str) and given in ("missing", "given"):
        return f"{name} is {given}; it must be {allowed}"
    return f"{name} is {on_one_line(given)}; allowed: {allowed}"


class LowbitError(Exception):
    """The base class: catch this to catch every error that lowbit raises on purpose."""

    def __str__(self) -> str:
        return one_line(self._sentence())

    def _sentence(self) -> str:
        """What was wrong, with its parts as they were given."""
        return super().__str__()


class ArgumentError(LowbitError, ValueError):
    """An argument that the operation does not allow; raised before any memory is written.

    >>> raise ArgumentError("bits", 5, "2, 3, 4 or 8")
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: bits is 5; allowed: 2, 3, 4 or 8
    >>> raise ArgumentError("count", 0, "at least 1", sentence="--count 0 asks for no tokens; give at least 1")
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: --count 0 asks for no tokens; give at least 1

    Args:
        argument: its name.
        given: what it was.
        allowed: what it may be.
        sentence: the whole message, where one made of the three others would not be a sentence.
    """

    def __init__(self, argument: str, given: object, allowed: str, sentence: str = "") -> None:
        super().__init__(argument, given, allowed, sentence)
        self.argument, self.given, self.allowed, self.sentence = argument, given, allowed, sentence

    def _sentence(self) -> str:
        return self.sentence or _said(self.argument, self.given, self.allowed)


class FormatError(LowbitError, ValueError):
    """A file that is truncated, corrupted or of another kind than expected.

    >>> raise FormatError("model.gguf", "tensor count", 2**60, "at most 100000")
    Traceback (most recent call last):
    lowbit.errors.FormatError: model.gguf: tensor count is 1152921504606846976; allowed: at most 100000
    >>> raise FormatError("model.gguf", "tensor 'output.weight'", "missing", "in the file")
    Traceback (most recent call last):
    lowbit.errors.FormatError: model.gguf: tensor 'output.weight' is missing; it must be in the file
    """

    def __init__(self, file: str, field: str, given: object, allowed: str) -> None:
        super().__init__(file, field, given, allowed)
        self.file, self.field, self.given, self.allowed = file, field, given, allowed

    def _sentence(self) -> str:
        return f"{self.file}: {_said(self.field, self.given, self.allowed)}"


class UnavailableError(LowbitError, RuntimeError):
    """Something that is missing on this machine, with the reason and what to do about it.

    >>> raise UnavailableError("backend cppyy", "no C++ compiler was found", "install g++ or clang++")
    Traceback (most recent call last):
    lowbit.errors.UnavailableError: backend cppyy is unavailable: no C++ compiler was found; install g++ or clang++

    Args:
        what: is missing or does not work.
        reason: why.
        remedy: what the user can do.
        sentence: the whole message, where one made of the three others would not be a sentence.
    """

    def __init__(self, what: str, reason: str, remedy: str, sentence: str = "") -> None:
        super().__init__(what, reason, remedy, sentence)
        self.what, self.reason, self.remedy, self._said = what, reason, remedy, sentence

    def _sentence(self) -> str:
        return self._said or f"{self.what} is unavailable: {self.reason}; {self.remedy}"


class NotDeclaredError(LowbitError, NotImplementedError):
    """A call of an operation that the backend does not declare. No other backend answers it instead.

    >>> raise NotDeclaredError("numpy", "linear.qgemv", "bits 8")
    Traceback (most recent call last):
    lowbit.errors.NotDeclaredError: backend numpy does not declare linear.qgemv for bits 8
    """

    def __init__(self, backend: str, operation: str, detail: str = "") -> None:
        super().__init__(backend, operation, detail)
        self.backend, self.operation, self.detail = backend, operation, detail

    def _sentence(self) -> str:
        suffix = f" for {self.detail}" if self.detail else ""
        return f"backend {self.backend} does not declare {self.operation}{suffix}"


def words_of(error: BaseException) -> str:
    """The class and the message of an error of other code, which may fail to give its message.

    >>> words_of(KeyError("x"))
    "KeyError: 'x'"
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as second:
        return f"{type(error).__name__}, whose text cannot be made ({type(second).__name__})"
