"""Plans by name: a mode and its settings, as in "tree/nodes=63", "overlap/b=8/groups=2" or "loop/passes=3@1"."""

from __future__ import annotations

from typing import Any, NamedTuple

from selfspec.plan import BRANCHES

FIELDS = {
    "b": "block_size",
    "nodes": "tree_nodes",
    "rule": "rule",
    "groups": "groups",
    "verify": "verify_length",
    "passes": "passes",
    "prefix": "prefix",
}
TEXTS = {"rule", "prefix"}  # whose values are names; all others are numbers
LENGTHS = "lengths"


class Named(NamedTuple):
    """What a name says.

    Attributes:
        mode: of `selfspec.plan.MODES`, or several joined by "+"; "auto" too.
        given: fields of `Plan`.
        adapter: index; None where the name leaves it open.
        lengths: a length rule, see `selfspec.plan.lengths.named`.
    """

    mode: str
    given: dict[str, Any]
    adapter: int | None = None
    lengths: str | None = None


def read(name: str) -> Named:
    """Take a name apart.

    Args:
        name: a mode, then settings with slashes between them, then @ and the adapter's index: "b" (the block's size),
            "nodes" and "rule" of a tree, "groups" (a number, or "branches"), "verify" (nodes of a chain that are
            verified), "passes" and "prefix" of a loop, "lengths" (a length rule, as in
            "sequential/lengths=product:threshold=0.1").

    Raises:
        ValueError: a setting of another form; which modes there are is for `Plan` to say.
    """
    text, at, adapter = name.partition("@")
    mode, *settings = text.split("/")
    given: dict[str, Any] = {}
    for key, _, value in (s.partition("=") for s in settings):
        word = key in TEXTS or key == LENGTHS or (key == "groups" and value == BRANCHES)
        if key not in (*FIELDS, LENGTHS) or not (value if word else value.isdigit()):
            raise ValueError(
                f"{name!r}: expected settings of the form {', '.join(FIELDS)}=NUMBER (rule, prefix and {LENGTHS} have "
                f"names), got {key}={value}"
            )
        given[FIELDS.get(key, key)] = value if word else int(value)
    if mode == "auto" and (given or at):
        raise ValueError(f"{name!r}: with mode='auto' the planner chooses; leave its settings out")
    if mode == "lookup" and "verify_length" in given:
        raise ValueError(f"{name!r}: looked-up drafts are all verified; b= makes their block smaller")
    if at and not adapter.isdigit():
        raise ValueError(f"{name!r}: expected the adapter's index after @, got {adapter!r}")
    return Named(mode, given, int(adapter) if at else None, given.pop(LENGTHS, None))
