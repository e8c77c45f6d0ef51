"""The Chinese of the page, beside the English texts that it stands for. A test finds texts without one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from app.chinese.benchmark import BENCHMARK
from app.chinese.chat import CHAT
from app.chinese.live import LIVE
from app.chinese.models import MODELS
from app.chinese.panel import PANEL
from app.chinese.pictures import PICTURES
from app.chinese.settings import SETTINGS

CHINESE: Mapping[str, str] = MappingProxyType(
    {**BENCHMARK, **CHAT, **LIVE, **MODELS, **PANEL, **PICTURES, **SETTINGS}
)
