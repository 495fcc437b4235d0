"""Generation settings of single rows: transformers' names and OpenAI's, on the run's defaults."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from transformers import GenerationConfig

from selfspec import settings
from selfspec.generation import Extras, build_requests
from selfspec.model import SelfSpecModel
from selfspec.sampling import Pipeline
from selfspec.session import Request

ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
EXTRAS = ("seed", "presence_penalty", "frequency_penalty", "response_format")  # what generate takes beside its settings
PARAMETERS = {k for k in vars(GenerationConfig()) if not k.startswith("_")} - {"transformers_version"}
PARAMETERS |= {*ALIASES, *EXTRAS, "stop"}
WHOLE = {"max_new_tokens", "min_new_tokens", "top_k", "seed", "no_repeat_ngram_size"}
# fields that a row's one answer, which is a text, has no place for; max_length would lose to the default of new tokens
NO_PLACE = {"num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits", "max_length"}
# fields that turn greedy decoding into sampling where a row sets them
DRAWING = {"temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}


def checked(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters under transformers' names; `temperature` 0 is greedy, and so is a row that says nothing.

    Raises:
        ValueError: two names for one thing with two values, or a value of another kind.
    """
    out: dict[str, Any] = {}
    for name, value in params.items():
        if value is None:
            continue
        key = ALIASES.get(name, name)
        if out.setdefault(key, value) != value:
            raise ValueError(f"{name}={value!r} and {key}={out[key]!r} mean the same")
        if key in NO_PLACE and value is not False and not (key == "num_return_sequences" and value == 1):
            instead = "say max_new_tokens" if key == "max_length" else "a row has one answer, and that is a text"
            raise ValueError(f"{name}={value!r}: {instead}")
        if key in WHOLE and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}={value!r}: expected a whole number")
    if "max_new_tokens" in out and out["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens={out['max_new_tokens']}: expected 1 or more")
    heat = out.get("temperature", 1.0)
    if isinstance(heat, bool) or not isinstance(heat, int | float) or not 0 <= heat < float("inf"):
        raise ValueError(f"temperature={heat!r}: expected a number of at least 0")
    for name in ("top_p", "min_p", "typical_p"):
        share = out.get(name, 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"{name}={share!r}: expected a number from 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = out.get(name, 0)
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise ValueError(f"{name}={penalty!r}: expected a number")
    if not isinstance(out.get("response_format", {}), dict):
        raise ValueError(f"response_format={out['response_format']!r}: expected an object")
    stop = out.pop("stop", None)
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop={stop!r}: expected a text or a list of texts, none empty")
        if "stop_strings" in out:
            raise ValueError("stop and stop_strings mean the same")
        out["stop_strings"] = stops
    if out.get("top_k") == -1:
        out["top_k"] = 0  # both mean that nothing is cut
    neutral = {"top_p": 1, "top_k": 0}
    drawing = any(k in out and not (k in neutral and out[k] == neutral[k]) for k in DRAWING)
    out.setdefault("do_sample", drawing and heat > 0)
    if heat == 0:
        if params.get("do_sample"):
            raise ValueError("temperature=0 is greedy, and do_sample is set")
        out.pop("temperature")
    return out


def stops_of(params: dict[str, Any]) -> list[str]:
    """Texts that end an answer and are not part of it (OpenAI's `stop`; transformers' `stop_strings` are kept)."""
    stop = params.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


class Builder:
    """Makes requests of prompts and parameters.

    Args:
        model: whose generation settings are underneath.
        defaults: of the run, over the model's and under a row's.
        seed: of the run; a sampled row without a seed gets one from it and its own name.

    Raises:
        ValueError: a default that cannot be used.
    """

    def __init__(self, model: SelfSpecModel, defaults: dict[str, Any] | None = None, seed: int = 0):
        self.model, self.defaults, self.seed = model, dict(defaults or {}), seed
        self.pipelines: dict[str, Pipeline] = {}  # one for all rows of the same settings: they are drawn together
        checked(self.defaults)

    def request(self, prompt: list[int], params: dict[str, Any], name: str) -> Request:
        """A request.

        Args:
            prompt: token ids.
            params: the row's; they go before the defaults.
            name: the row's, for its seed.

        Raises:
            ValueError: a setting that cannot be acted on, or a prompt that leaves no room.
        """
        taken = {ALIASES.get(k, k) for k, v in params.items() if v is not None}
        fields = checked({**{k: v for k, v in self.defaults.items() if ALIASES.get(k, k) not in taken}, **params})
        own = {k: fields.pop(k, None) for k in EXTRAS}
        cap = self._cap(len(prompt), fields, "max_new_tokens" in taken)
        model = self.model
        config = settings.merge(model.model.generation_config, None, {**fields, "max_new_tokens": cap})
        if config.do_sample:
            own["seed"] = _seed(self.seed, name) if own["seed"] is None else own["seed"]
        else:
            own["seed"] = None  # nothing is drawn
        key = json.dumps({**fields, **own, "seed": None}, sort_keys=True, default=repr)
        ready = [self.pipelines[key]] if key in self.pipelines else None
        extras = Extras(tokenizer=model.tokenizer, **own, pipelines=ready)
        request = build_requests(model.model, config, [prompt], len(prompt), cap, extras)[0]
        if (
            request.sampling is not None
            and request.recipe is not None
            and request.recipe.of_scores
            and len(self.pipelines) < 1024
        ):
            self.pipelines[key] = request.sampling.pipeline
        return request

    def _cap(self, length: int, fields: dict[str, Any], asked: bool) -> int:
        """New tokens; a default is cut to the room that there is, a row's own wish is not."""
        cap, limit = fields.pop("max_new_tokens", settings.DEFAULT_NEW_TOKENS), self.model.backbone.max_positions
        if not length:
            raise ValueError("the prompt is empty")
        if limit is None or length + cap <= limit:
            return cap
        if asked or length >= limit:
            raise ValueError(f"a prompt of {length} tokens and {cap} new ones exceed the model's {limit} positions")
        return limit - length


def _seed(seed: int, name: str) -> int:
    """The same for a row whenever and beside whomever it is answered."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogatepass")).digest()[:7])
