"""Configurations that no training can mean are refused in words, before anything is loaded."""

from __future__ import annotations

import pytest
import tiny_chat

from selfspec.training.config import TrainConfig
from selfspec.training.limits import DTYPES, SHARES
from selfspec.training.world import World


@pytest.mark.parametrize("name", SHARES)
def test_a_share_beyond_its_whole_is_refused(name: str) -> None:
    """A split_share of 25 meant all groups, an ema below 0 overshot the weights, and nothing said so."""
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"{name}={wrong!r}: expected a share from 0 to 1"):
            TrainConfig(**{name: wrong})
    for right in (0, 0.5, 1.0):
        assert getattr(TrainConfig(**{name: right}), name) == right


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.95, 0.99), (0.9, 1.0), (-0.1, 0.9), ("0.9", "0.95"), "ab"])
def test_betas_that_are_not_two_rates_are_refused(betas) -> None:
    """One was an IndexError once the model was loaded, and a third was left out without a word."""
    with pytest.raises(ValueError, match=r"betas=.*expected two numbers from 0 to below 1"):
        TrainConfig.from_dict({"betas": betas})
    assert TrainConfig.load(None, ["betas=[0, 0.99]"]).betas == (0, 0.99)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "nn", ""])
def test_a_dtype_that_no_model_is_trained_in_is_refused(dtype: str) -> None:
    """Any name that torch has was taken: `dtype=int8` failed in a layer, `dtype=nn` while the model was loaded."""
    with pytest.raises(ValueError, match=rf"dtype='{dtype}': expected one of auto, float32"):
        TrainConfig(dtype=dtype)
    assert [TrainConfig(dtype=name).dtype for name in DTYPES] == list(DTYPES)


def test_layers_to_split_and_one_process_are_refused(monkeypatch) -> None:
    """shard=true was forgotten where there was nobody to share with."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"shard=true .* accelerate launch"):
        World("cpu", shard=True)
    assert not World("cpu", shard=False).sharded
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # the launcher's habit, and nobody's wish
    assert not World("cpu").sharded


def test_the_command_line_says_what_a_field_may_be() -> None:
    result = tiny_chat.run("train", "model=m", "data=d", "warmup=4")
    assert result.exit_code == 2 and "warmup=4.0: expected a share from 0 to 1" in result.stderr
