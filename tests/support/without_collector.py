"""Importing this stops Python's search for garbage: before imports, which make none and of whose time it is
a part, or in a program that ends soon."""

from __future__ import annotations

import gc

gc.disable()
