"""Length rules as people name them: "product", "product:threshold=0.1", "scan:by=margin"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

SOURCES = ("head", "certainty", "margin")
TRUTH = {"true": True, "false": False}
KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": lambda text: TRUTH[text.lower()]}


@dataclass(frozen=True)
class Named:
    """A rule that was asked for.

    Attributes:
        name: in `LENGTHS`.
        settings: of the rule.
        by: where its confidences come from, one of `SOURCES`; None leaves that to the adapter.
    """

    name: str
    settings: dict[str, Any]
    by: str | None = None


def read(text: str, rules: dict[str, type], what: str = "lengths") -> Named:
    """What a text asks for: a name, then settings, with colons between them.

    Args:
        text: such as "product:threshold=0.1:by=margin".
        rules: by name.
        what: they are for; only lengths come from confidences of several sources.

    Raises:
        ValueError: an unknown name or setting, or a value of another kind; the message says what there is.
    """
    name, *given = text.split(":")
    if name not in rules:
        raise ValueError(f"{what}={text!r}: expected {', '.join(rules)}, with settings as in product:threshold=0.1")
    known = {f.name: f for f in fields(rules[name]) if f.type in KINDS}
    settings: dict[str, Any] = {}
    for word in given:
        key, _, value = word.partition("=")
        try:
            settings[key] = value if key == "by" and what == "lengths" else KINDS[str(known[key].type)](value)
        except (KeyError, ValueError):
            kinds = [f"{f.name}={f.type}" for f in known.values()]
            kinds += [f"by={'|'.join(SOURCES)}"] if what == "lengths" else []
            raise ValueError(f"{what}={text!r}: {word!r} is no setting of {name}; it has {', '.join(kinds)}") from None
    by = settings.pop("by", None)
    if by is not None and (by not in SOURCES or name == "adaflash"):
        raise ValueError(f"lengths={text!r}: by={by} is none of {', '.join(SOURCES)}, or the rule reads a head anyway")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in settings]
    if missing:
        raise ValueError(f"{what}={text!r}: {name} needs {', '.join(f'{n}=' for n in missing)}")
    return Named(name, settings, by)
