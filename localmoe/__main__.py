"""`python -m localmoe`: the localmoe command."""

import sys

from localmoe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
