"""What a completion says, whichever form it has."""

from typing import Any


def completion_text(completion: Any) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
