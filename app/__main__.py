"""`python -m app`: the chat page. Looks at HF_ENDPOINT first: the Hub's library cannot even be imported where
that is not the text of an address."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from localmoe.core.errors import DownloadError
from localmoe.core.hub_address import check_hub_address
from localmoe.core.teardown import silence_teardown
from localmoe.core.uninterrupted import ended_at_once


def start(argv: Sequence[str] | None = None) -> int:
    """Run the app; its exit code, as `app.main.main` gives it."""
    try:
        check_hub_address()
    except DownloadError as error:
        print(f"localmoe: {error}", file=sys.stderr)
        return 2
    with ended_at_once(0):  # the exit code of an end that is asked for, as later
        from app.main import main

    return main(argv)


if __name__ == "__main__":
    silence_teardown()
    sys.exit(start())
