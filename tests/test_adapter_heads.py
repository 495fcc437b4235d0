"""Adapters' heads in their folders: a file of their own, beside what is there."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import model_of, path_of

from selfspec.adapters import io
from selfspec.adapters.io import AdapterError

W, P, H, C = "mask_path.safetensors", "adapter_model.safetensors", "heads.safetensors", "selfspec.json"


@pytest.mark.parametrize("tuning", ["lora", "copy"])
def test_a_head_is_added_beside_what_is_there(tuning, tmp_path):
    """The path's own files stay as they are, byte for byte, and the head's goes to where the path is already."""
    model, own = model_of(), dict(tuning=tuning, heads=("markov",), head_rank=6)
    headed, bare = path_of(model, 0.3, **own), path_of(model, tuning=tuning)
    bare.load_state_dict({k: v for k, v in headed.state_dict().items() if not k.startswith("heads.")})
    one, two = io.save(bare, tmp_path / "one", model), io.save(headed, tmp_path / "two", model)
    files = [W, P] if tuning == "lora" else [W]
    assert all((one / f).read_bytes() == (two / f).read_bytes() for f in files)
    assert set(load_file(two / H)) == {"heads.markov.down.weight", "heads.markov.up.weight"}
    (one / H).write_bytes((two / H).read_bytes())
    (one / C).write_bytes((two / C).read_bytes())
    again, want = io.load(one, model).state_dict(), io.load(two, model).state_dict()
    assert again.keys() == want.keys() and all(torch.equal(again[k], want[k]) for k in want)
    io.save(bare, two, model)  # over the other one
    assert not (two / H).exists() and not io.load(two, model).heads


def test_heads_among_the_other_weights_still_load(tmp_path):
    """Where they stood before they had a file of their own."""
    model = model_of()
    path = path_of(model, 0.3, heads=("markov", "length"), head_rank=6)
    io.save(path, tmp_path, model, dtype=torch.float64)
    both = load_file(tmp_path / W) | load_file(tmp_path / H)
    save_file(both, tmp_path / W)
    with pytest.raises(AdapterError, match=r"heads stand in mask_path\.safetensors and in heads\.safetensors"):
        io.load(tmp_path, model)
    (tmp_path / H).unlink()
    again = io.load(tmp_path, model).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in path.state_dict().items())


def test_a_head_without_its_file_is_named(tmp_path):
    model = model_of()
    io.save(path_of(model, heads=("markov",)), tmp_path, model)
    (tmp_path / H).unlink()
    with pytest.raises(AdapterError, match=r"names the heads \('markov',\), and there is no heads\.safetensors"):
        io.load(tmp_path, model)
