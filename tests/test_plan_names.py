"""Plans by name: what users write after a mode is what rounds do."""

import pytest
from tiny import RAGGED, model_of, path_of, reference

from selfspec.draft.loop import Expected, Fixed, Product, prefix_of
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.plan.named import Named, read

N = 10


@pytest.fixture(scope="module")
def decoder():
    model = model_of()
    return SelfSpecModel(model, path_of(model, 0.3, prefix_splits=True, block_size=6))


def test_a_name_is_taken_apart():
    assert read("auto") == Named("auto", {})
    assert read("overlap+tree/nodes=9/groups=2@1") == Named("overlap+tree", {"tree_nodes": 9, "groups": 2}, 1)
    rule = "product:threshold=0.1:by=margin"
    assert read(f"sequential/b=4/lengths={rule}") == Named("sequential", {"block_size": 4}, None, rule)
    for name in ("tree/nodes=x", "tree/what=3", "overlap/groups=", "loop/b", "tree@x", "tree@", "loop/prefix="):
        with pytest.raises(ValueError, match=r"expected (settings|the adapter)"):
            read(name)


def test_what_a_name_says_goes_before_what_is_said_of_all_modes(decoder):
    assert decoder.plan("sequential/b=4", 3) == Plan("sequential", 4)
    assert decoder.plan("tree/nodes=9", 5, 7) == Plan("tree", 5, 9)
    assert decoder.plan("sequential/verify=3") == Plan("sequential", 6, verify_length=3)
    assert decoder.plan("loop/passes=3/prefix=fixed:s=2").prefix == "fixed:s=2"
    assert decoder.policy("sequential/lengths=fixed:length=2").plans == [Plan("sequential", 6, verify_length=3)]
    for wrong in ("sequential/prefix=fixed", "sequential/rule=opt-tree", "tree/rule=best", "loop/passes=1", "tree@1"):
        with pytest.raises(ValueError):
            decoder.plan(wrong)


def test_prefix_rules_have_names():
    assert prefix_of("product") == Product(0.6) and prefix_of("product:threshold=0.8") == Product(0.8)
    assert prefix_of("fixed:s=2") == Fixed(2) and prefix_of("expected:factor=0.5") == Expected(0.5)
    for wrong in ("half", "fixed:t=1", "product:by=margin"):
        with pytest.raises(ValueError, match="prefix="):
            prefix_of(wrong)


def test_a_wrong_prefix_rule_is_refused_before_any_work(decoder):
    with pytest.raises(ValueError, match="prefix='half'"):
        decoder.generate(RAGGED, max_new_tokens=N, mode="loop/prefix=half")


@pytest.mark.parametrize(
    "name",
    [
        "overlap/b=4/groups=2",
        "overlap/groups=branches",
        "overlap+tree/nodes=7/groups=3",
        "loop/passes=3/prefix=fixed:s=2",
        "loop+tree/nodes=7/prefix=expected:factor=0.5",
        "sequential/b=5/verify=3",
        "sequential/lengths=product:threshold=0.2",
    ],
)
def test_generate_takes_names(name, decoder):
    got = decoder.generate(RAGGED, max_new_tokens=N, mode=name)
    assert [row[-N:].tolist() for row in got] == reference(decoder.model, RAGGED, N)
    assert decoder.stats.rounds


def test_a_looked_up_draft_cut_by_name_is_refused(decoder):
    """Rounds verified all of it, and were counted as shorter: graphs had too few keys."""
    with pytest.raises(ValueError, match="looked-up"):
        decoder.plan("lookup/verify=2")


@pytest.mark.parametrize("name", ["sequential/verify=1", "overlap/verify=1", "sequential/lengths=fixed:length=0"])
def test_nothing_verified_beside_the_anchor_is_plain_decoding_also_of_drawn_texts(name, decoder):
    how = dict(max_new_tokens=N, do_sample=True, seed=[1, 2, 3])
    assert decoder.generate(RAGGED, mode=name, **how).tolist() == decoder.generate(RAGGED, mode="ar", **how).tolist()


def test_a_tree_rules_name_is_no_length_rule(decoder):
    decoder.policy("tree/nodes=5/rule=taps")
    with pytest.raises(ValueError, match="lengths='taps'"):
        decoder.policy("sequential", lengths="taps")


@pytest.mark.parametrize("name", ["auto/b=8", "auto@0", "auto/lengths=product"])
def test_auto_takes_no_settings_and_says_so(name, decoder):
    """The message named auto among what was expected instead of it."""
    with pytest.raises(ValueError, match="the planner chooses"):
        decoder.policy(name)
