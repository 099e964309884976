"""What each layout writes: a directory or a file."""

from lowbit.rewriting.layouts import Layout
from lowbit.rewriting.to_directory import ToDirectory
from lowbit.rewriting.to_gguf import ToGGUF
from lowbit.rewriting.writing import Target


def target_of(layout: Layout) -> Target:
    """The target of a layout."""
    return ToGGUF(layout) if layout.is_file else ToDirectory(layout)
