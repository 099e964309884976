"""A child process in which some packages cannot be found."""

ABSENCE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""The text of a ``sitecustomize.py``, to be formatted with `absent`, a tuple of package names."""
