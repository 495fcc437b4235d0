"""What runs where nobody names a mode."""

import pytest
import torch
from tiny import PROMPT, RAGGED, model_of, path_of, reference

import selfspec
from selfspec import SelfSpecModel, bench, options
from selfspec.options import Chosen
from selfspec.plan.planner import Planner
from selfspec.planners import default_mode
from selfspec.serving import Engine
from selfspec.serving.batch import Batcher, BatchOptions

ONE = torch.tensor([PROMPT])
N = 12
VERIFIERS = ("coupled", "rejection", "block", "multi")


def decoder(**config):
    model = model_of()
    return SelfSpecModel(model, path_of(model, 0.2, **config))


def plans(policy):
    return [(p.mode, p.block_size, p.tree_nodes) for p in policy.plans]


@pytest.mark.parametrize(
    "given, mode",
    [
        ({}, "auto"),
        ({"block_size": 4}, "sequential"),
        ({"lengths": "product"}, "sequential"),
        ({"block_size": 4, "lengths": "product"}, "sequential"),
        ({"tree_nodes": 7}, "tree"),
        ({"tree_nodes": 7, "block_size": 4}, "tree"),
        ({"verify": "block"}, "sequential"),
        ({"verify": "multi", "tree_nodes": 7}, "tree"),
    ],
)
def test_what_is_given_is_heeded(given, mode):
    assert default_mode(True, **given) == mode
    policy = decoder().policy(**given)
    if mode == "auto":
        assert isinstance(policy, Planner)
        return
    [plan] = policy.plans
    assert plan.mode == mode and plan.block_size == given.get("block_size", 5)
    assert not plan.tree or plan.tree_nodes == 7
    assert (policy.pruning is not None) == ("lengths" in given)


def test_without_an_adapter_drafts_are_looked_up():
    assert plans(SelfSpecModel(model_of()).policy()) == [("lookup", 8, 31)]
    assert plans(SelfSpecModel(model_of()).policy(block_size=4)) == [("lookup", 4, 31)]
    with pytest.raises(ValueError, match="none is loaded"):
        SelfSpecModel(model_of()).policy(tree_nodes=7)


def test_nothing_given_is_ignored():
    """A tree's size beside a chain was; so was one without a mode."""
    model = decoder()
    for mode in ("ar", "sequential", "overlap", "auto"):
        with pytest.raises(ValueError, match="tree_nodes=7: mode='" + mode):
            model.policy(mode, tree_nodes=7)
    with pytest.raises(ValueError, match="the planner chooses"):
        model.policy("auto", block_size=4)
    with pytest.raises(ValueError, match="tree"):
        model.policy(lengths="product", tree_nodes=7)


def test_every_door_takes_the_same_default(tmp_path):
    model = decoder()
    planner = model.policy()
    assert isinstance(planner, Planner) and Engine(model, slots=2).plan is planner
    assert Batcher(model, BatchOptions(slots=2)).engine.plan is planner
    assert options.check_modes(model, None, Chosen()) == ["auto"]
    assert options.check_modes(model, None, Chosen(tree_nodes=7)) == ["tree"]
    assert options.check_modes(model, None, Chosen(block_size=4)) == ["sequential"]
    assert options.check_modes(SelfSpecModel(model_of()), None, Chosen()) == ["lookup"]
    with pytest.raises(ValueError, match="builds no tree"):
        options.check_modes(model, ("ar", "sequential"), Chosen(tree_nodes=7))
    assert options.check_modes(model, ("auto", "tree"), Chosen(tree_nodes=7)) == ["auto", "tree"]
    assert "auto" in bench.possible(model, Chosen()) and "auto" not in bench.possible(model, Chosen(block_size=4))
    fast = selfspec.custom_generate(path_of(model.model, 0.2))
    how = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": N, "do_sample": False}
    out = model.model.generate(ONE, custom_generate=fast, **how)
    assert out[0, len(PROMPT) :].tolist() == reference(model.model, [PROMPT], N)[0]
    assert fast.decoder.policy().rounds > 0


def test_the_default_changes_no_text():
    model = decoder()
    out = model.generate(RAGGED, max_new_tokens=N)
    assert out[:, len(PROMPT) :].tolist() == reference(model.model, RAGGED, N)
    draw = {"do_sample": True, "top_k": 0, "seed": 3, "max_new_tokens": N}
    assert torch.equal(model.generate(RAGGED, **draw), model.generate(RAGGED, **draw, mode="ar"))


@pytest.mark.parametrize("verify", VERIFIERS)
def test_every_verifier_takes_the_default_and_repeats_itself(verify):
    """Cut by the clock, the text of a seed would be another one in the next run."""
    model = decoder()
    draw = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 5, "max_new_tokens": 24, "verify": verify}
    assert torch.equal(model.generate(ONE, **draw), model.generate(ONE, **draw))
    chains = model.generate(ONE, **draw, mode="sequential")
    assert verify == "coupled" or torch.equal(model.generate(ONE, **draw), chains)


def test_an_adapter_that_nothing_can_use_is_named(caplog):
    """Nobody asks for a layout by name any more: it would have been a slow run without a word."""
    decoder(layouts=("hidden",)).policy()
    assert "adapter 0 drafts in no mode (layouts hidden)" in caplog.text
    caplog.clear()
    decoder().policy()
    assert not caplog.text
