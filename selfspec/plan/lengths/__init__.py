"""How many drafts of a block to verify: rules by name, and where their confidences come from.

A rule is called with confidences [N, T], the probability that each draft is accepted if those before it are, and gives
[N] long, drafts to verify; `AdaFlash` reads the probability [N, T + 1] of every accepted length instead. All run on the
device. Confidences come from `margin.Margins` (learnt while serving), from a trained head, or are the marginals'
largest probabilities. `selfspec.pruning` asks the rule that a user names, by `lengths=` or `--lengths`.

With drafts that are drawn and verified against q, the decision to include depth i may use the marginals and the tokens
before i, never token i or later, or the text's law breaks. Confidences must therefore never be those of the drawn
tokens. Where they depend on earlier drawn tokens (a Markov head, a loop), a rule must also decide in order: whether
depth i is in may not wait for confidences of i + 1, which have seen token i. `in_order` says which rules do; `require`
refuses the others.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from selfspec.plan.lengths.adaflash import AdaFlash
from selfspec.plan.lengths.fixed import Fixed
from selfspec.plan.lengths.libraspec import LibraSpec
from selfspec.plan.lengths.margin import Margins
from selfspec.plan.lengths.product import Product
from selfspec.plan.lengths.scan import Scan

__all__ = ["LENGTHS", "AdaFlash", "Fixed", "LibraSpec", "Margins", "Product", "Rule", "Scan", "require"]

Rule = Callable[[Tensor], Tensor]
LENGTHS: dict[str, type] = {
    "fixed": Fixed,
    "product": Product,
    "libraspec": LibraSpec,
    "scan": Scan,
    "adaflash": AdaFlash,
}


def require(rule, drawn: bool, conditioned: bool) -> None:
    """Refuse a rule that would foresee a draw.

    Args:
        rule: of `LENGTHS`.
        drawn: drafts are drawn and verified against q (rejection or block verification).
        conditioned: confidences depend on the drafts' earlier tokens (a Markov or sampler head, a loop).

    Raises:
        ValueError: says what to do.
    """
    if drawn and conditioned and not rule.in_order:
        raise ValueError(
            f"{type(rule).__name__} looks at later confidences, which here have seen the drawn tokens before them; "
            "take 'product', 'fixed' or scan with in_order=True, or verify='coupled'"
        )
