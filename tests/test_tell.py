"""What an adapter tells of the kinds of its drafts."""

import json
from collections import Counter

import pytest
import tiny

from selfspec import SelfSpecModel, tell
from selfspec.adapters import io
from selfspec.plan.family import families, name_of
from selfspec.stats import Stats


def test_every_kind_is_measured_on_the_same_prompts():
    model = tiny.model_of()
    spec = SelfSpecModel(model, tiny.path_of(model, block_size=8))
    told = tell.accepted(spec, [[1, 2, 3], [4, 5]], max_new_tokens=12)
    assert next(iter(told)) == "chain" and {"block=2", "block=4", "tree=15", "tree=31", "tree=63"} <= set(told)
    assert all(0 <= share <= 1 for shares in told.values() for share in shares)
    for name, plan in tell.kinds(spec.path.config).items():
        assert name == "chain" or name_of(families(plan)[0]) == name


def test_positions_that_few_rounds_came_to_are_not_told():
    stats = Stats()
    stats.accepted = Counter({1: 50, 2: 30, 3: 10, 4: 9})
    assert tell.shares(stats, 15) == (pytest.approx(49 / 99, abs=1e-4), pytest.approx(19 / 49, abs=1e-4))
    assert len(tell.shares(stats, 1)) == 1
    assert tell.shares(Stats(), 3) == (0.0,)


def test_an_adapter_s_folder_keeps_them(tmp_path):
    model = tiny.model_of()
    path = tiny.path_of(model, block_size=4, acceptance=(0.5,), acceptance_of={"tree=15": [0.7, 0.6]})
    folder = io.save(path, tmp_path / "adapter", model)
    assert json.loads((folder / io.CONFIG).read_text())["acceptance_of"] == {"tree=15": [0.7, 0.6]}
    assert io.load(folder, model).config.acceptance_of == {"tree=15": (0.7, 0.6)}


@pytest.mark.parametrize("given", [{"tree=15": [1.5]}, {"chain": [0.5]}, {"tree=15": []}])
def test_what_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError, match=r"acceptance_of|tree=15"):
        tiny.path_of(tiny.model_of(), acceptance_of=given)
