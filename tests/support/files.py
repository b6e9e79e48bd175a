"""Edit files as an outsider would."""

import json
from pathlib import Path
from typing import Any


def edit_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file that whence wrote, and remove its checksum."""
    content = {**json.loads(path.read_text()), **changes}
    content.pop("checksum", None)
    path.write_text(json.dumps(content))


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip a bit of the byte at a place."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
