"""The build backend of the launch tests' checkout: an editable wheel without any build dependency.

With FAKE_DISK_FULL set it meets a full disk; with FAKE_SLOW_BUILD, a path, it makes that file and waits until
it is gone. It decides nothing else.
"""

from __future__ import annotations

import errno
import os
import time
import zipfile
from pathlib import Path

INFO = "localmoe-9.8.7.dist-info"
METADATA = """Metadata-Version: 2.1
Name: localmoe
Version: 9.8.7
Provides-Extra: app
Provides-Extra: dev
Provides-Extra: gpu
Requires-Dist: torch<3,>=2.11
Requires-Dist: pytest; extra == "dev"
"""


def build_editable(
    wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None
) -> str:
    if os.environ.get("FAKE_DISK_FULL"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if os.environ.get("FAKE_SLOW_BUILD"):
        waiting = Path(os.environ["FAKE_SLOW_BUILD"])
        waiting.touch()
        while waiting.exists():
            time.sleep(0.02)
    files = {
        "localmoe.pth": f"{Path.cwd()}\n",
        f"{INFO}/METADATA": METADATA,
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{INFO}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{INFO}/RECORD"])
    name = "localmoe-9.8.7-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return name
