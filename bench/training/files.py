"""Writing JSON files whole or not at all."""

import json
from pathlib import Path
from typing import Any

from lowbit.system.storage import write_whole


def as_json(content: Any) -> bytes:
    """Indented, with a line feed at the end."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    """Write it under a temporary name and rename it."""
    write_whole(path, as_json(content))
