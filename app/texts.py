"""The page's languages. English texts stand where they are used and are the keys; app/chinese/ has the other
language, whole sentences side by side. Decides no wording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.chinese import CHINESE

Language = Literal["en", "zh"]


@dataclass(frozen=True, slots=True)
class Texts:
    """Calling it with an English text gives the text of its language, with the values filled in."""

    language: Language = "en"

    def __call__(self, english: str, **values: object) -> str:
        """A text that has no translation, such as an error's sentence, stays English."""
        text = CHINESE.get(english, english) if self.language == "zh" else english
        return text.format(**values) if values else text


ENGLISH, IN_CHINESE = Texts("en"), Texts("zh")


def texts_for(language: object) -> Texts:
    """What the browser's or the user's choice means: any Chinese is "zh", all else English."""
    return IN_CHINESE if isinstance(language, str) and language.lower().startswith("zh") else ENGLISH
