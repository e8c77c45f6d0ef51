"""What a benchmark on random weights simulates: routing, acceptance, the draft's routing. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localmoe.core.errors import ConfigError

RoutingKind = Literal["uniform", "sticky", "trace"]


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How the target routes.

    Attributes:
        kind: "uniform" draws every token's experts afresh; "sticky" keeps each with a probability; "trace"
            replays a recorded one.
        repeat: of "sticky": probability that one of a layer's experts stays for the next token.
        path: of "trace": the file.
    """

    kind: RoutingKind
    repeat: float = 0.0
    path: Path | None = None

    def __post_init__(self) -> None:
        _check_share("The repeat share of sticky routing", self.repeat)
        assert (self.path is not None) == (self.kind == "trace")

    def __str__(self) -> str:
        match self.kind:
            case "sticky":
                return f"sticky:{self.repeat:g}"
            case "trace":
                return f"trace:{self.path}"
            case "uniform":
                return "uniform"


def parse_routing(text: str) -> RoutingSpec:
    """ "uniform", "sticky:P" or "trace:FILE", as typed by a user.

    Raises:
        ConfigError: it is none of them, or P is no share.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == "uniform" and not colon:
        return RoutingSpec("uniform")
    if kind == "sticky" and rest:
        return RoutingSpec("sticky", repeat=parse_share(rest))
    if kind == "trace" and rest:
        return RoutingSpec("trace", path=Path(rest))
    raise ConfigError(f"Routing '{text}' is unknown: use uniform, sticky:P (P from 0 to 1) or trace:FILE.")


def parse_share(text: str) -> float:
    """A share from 0 to 1, as typed by a user.

    Raises:
        ConfigError: it is no number, or out of range.
    """
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"'{text}' is not a number: use a share from 0 to 1, such as 0.9.") from None
    _check_share("The share", value)
    return value


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:  # NaN fails too
        raise ConfigError(f"{name} is {value:g}, which is out of range: use a value from 0 to 1.")


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """What stands in for a trained model's behaviour; None leaves it to the random weights.

    Attributes:
        routing: how the target routes; None: as its router does.
        acceptance: probability that a drafted token is accepted; None: if the target agrees. Simulated
            margins come with it.
        match: probability that the draft's experts of a (token, layer) are the target's; None: the draft
            routes as its router does. Needs `routing`.
        seed: of all draws, and of the weights.
    """

    routing: RoutingSpec | None = None
    acceptance: float | None = None
    match: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.acceptance is not None:
            _check_share("The synthetic acceptance", self.acceptance)
        if self.match is not None:
            _check_share("The synthetic match", self.match)
            if self.routing is None:
                raise ConfigError(
                    "A synthetic match needs a synthetic routing to match: add one, such as uniform or "
                    "sticky:0.5."
                )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"Seed {self.seed} is out of range: use 0 to 2^63 - 1.")

    def as_dict(self) -> dict[str, str | float | int | None]:
        """Plain values for --json."""
        return {
            "routing": None if self.routing is None else str(self.routing),
            "acceptance": self.acceptance,
            "match": self.match,
            "seed": self.seed,
        }

    def __str__(self) -> str:
        """For people, e.g. "routing sticky:0.5, match 0.9, acceptance 0.8"."""
        parts = [f"routing {self.routing or 'of random weights'}"]
        if self.routing is not None:
            parts.append(f"match {'of random weights' if self.match is None else f'{self.match:g}'}")
        parts.append(
            f"acceptance {'of random weights' if self.acceptance is None else f'{self.acceptance:g}'}"
        )
        return ", ".join(parts)
