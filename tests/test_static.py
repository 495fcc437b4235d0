"""What runs between two forwards reads nothing on the host: on the meta device, tensors have no values to read."""

import pytest
import torch

from selfspec import rows
from selfspec.draft import DraftTree, cut
from selfspec.draft import tree as trees
from selfspec.draft.condition import Condition, Given, Scored, propose
from selfspec.draft.drawn import replay
from selfspec.draft.levels import by_levels
from selfspec.draft.loop import PREFIXES
from selfspec.draft.overlap import branches, corrections, ends, find, hidden, keep, survival
from selfspec.draft.trees import TAPS, Bastion, CaDDTree, OPTTree
from selfspec.draft.trees.domino import DominoTree
from selfspec.forecast import Forecast
from selfspec.growth import together
from selfspec.plan import Plan
from selfspec.plan.lengths import AdaFlash, Fixed, LibraSpec, Margins, Product, Scan
from selfspec.plan.lengths.margin import margins
from selfspec.pruning import Pruning
from selfspec.sampling import noisy_among
from selfspec.verify.greedy import walk

N, T, V, M = 3, 5, 11, 9


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def long(*shape):
    return meta(*shape, dtype=torch.long)


def given(tree=True):
    return DraftTree(long(N, M), long(N, M) if tree else None, scores=meta(N, M))


def grown(anchor, top, ids, budget, order=None):
    """The growth kernel's outcome."""
    m = budget + 1
    return DraftTree(long(N, m), long(N, m), None, meta(N, m), meta(N, m, m, dtype=torch.bool), long(N, m))


def taps():
    rule, logits = TAPS(T, "meta"), meta(N, T, V)
    tree = rule(long(N), logits, M - 1)
    rule.observe(tree, long(N, M), meta(N, dtype=torch.bool))


def learnt():
    rule, m = Margins(T, "meta", every=1, warm=1), margins(meta(N, T, V))
    rule.observe(m, long(N), long(N))
    return rule(m)


def pruned(rule):
    """The length of a batch: the host reads it, but not before it is whole."""
    told = Forecast(meta(N, T), meta(N, T + 1)).first(T - 1)
    told.keep(Forecast(meta(N, T), meta(N, T + 1)))
    times = meta(T) if rule == "scan" else None
    body = type("", (), {"device": torch.device("meta"), "path": None})()
    return Pruning(rule, [body])(Plan(), meta(N, T - 1, V), told, meta(N, dtype=torch.bool), times).drafts


def conditioned(nodes):
    told = Condition(lambda states, before: states, lambda states: meta(*states.shape[:-1], V), meta(V, 2))
    given = Given(told, meta(N, T, 2), long(N), banned=3)

    def noised(scores, tokens, place):
        flat, position = scores.flatten(0, 1), (long(N, 1) + place).flatten()
        return noisy_among(flat, tokens.flatten(0, 1), long(len(flat)), position).view(scores.shape)

    propose(long(N), meta(N, T, V), given, nodes)
    return propose(long(N), meta(N, T, V), given, nodes, Scored(noised=noised))


PATHS = {
    "walk": lambda: walk(given(), long(N, M)),
    "walk of a chain": lambda: walk(given(False), long(N, M)),
    "layout": lambda: rows.row_to_row(rows.tree(long(N), long(N, M), given().ancestors)),
    "cut": lambda: cut(grown(None, None, None, M - 1), long(N)),
    "caddtree": lambda: CaDDTree()(together(meta(N, M), meta(N, dtype=torch.bool)), meta(M)),
    "bastion": lambda: Bastion()(meta(N, M), meta(M)),
    "taps": taps,
    "opt-tree": lambda: OPTTree()(long(N), meta(N, T, V), M - 1),
    "dominotree": lambda: DominoTree(lambda tokens, d: meta(N, tokens.shape[1], V))(long(N), meta(N, T, V), M - 1),
    "levels": lambda: by_levels(long(N), lambda at, d: (meta(*at.shape, 4), long(*at.shape, 4)), T, 30, 3),
    "conditioned tree": lambda: conditioned(M - 1),
    "conditioned chain": lambda: conditioned(None),
    "replay": lambda: replay(given(), long(N, T, 4)),
    "ends": lambda: keep(ends(given(), survival(given(), meta(N, M))), 4),
    "branches": lambda: branches(given(False), corrections(given(False), meta(N, M - 1, V)), 2),
    "find": lambda: find(hidden(long(N, 4)), long(N), long(N)),
    "prefixes": lambda: [make()(meta(N, T)) for make in PREFIXES.values()],
    "pruning": lambda: [pruned(rule) for rule in ("scan", "product", "adaflash", "libraspec:by=certainty")],
    "lengths": lambda: [f(meta(N, T)) for f in (Fixed(2), Product(), LibraSpec(), Scan(meta(T + 1)), AdaFlash())],
    "margins": learnt,
}


@pytest.mark.parametrize("name", PATHS)
def test_nothing_is_read_on_the_host(name, monkeypatch):
    monkeypatch.setattr(trees, "grow", grown)
    monkeypatch.setattr("selfspec.draft.condition.grow", grown)
    monkeypatch.setattr("selfspec.draft.trees.taps.grow", grown)
    PATHS[name]()


def test_a_host_read_would_be_seen():
    with pytest.raises((RuntimeError, NotImplementedError)):
        trees.best_first(long(N), meta(N, T, V), 4)  # the reference, which is the host's
