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
        if key in WHOLE and isinstance(value, float) and value.is_integer():
            value = int(value)  # a table's column of whole numbers with gaps holds floats
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
    if not isinstance(out.get("do_sample", False), bool):
        raise ValueError(f"do_sample={out['do_sample']!r}: expected true or false")
    for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        given = out.get(name, [])
        ids = [given] if name == "eos_token_id" and isinstance(given, int) else given
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError(f"{name}={given!r}: expected token ids")
    stops = [s for name in ("stop", "stop_strings") if (s := _texts(name, out.pop(name, None)))]
    if len(stops) > 1:
        raise ValueError("stop and stop_strings mean the same")
    if stops:
        out["stop_strings"] = stops[0]
    if out.get("top_k") == -1:
        out["top_k"] = 0  # both mean that nothing is cut
    neutral = {"top_p": 1, "top_k": 0}
    drawing = any(k in out and not (k in neutral and out[k] == neutral[k]) for k in DRAWING)
    out.setdefault("do_sample", drawing and heat > 0)
    if heat == 0 and params.get("do_sample"):
        raise ValueError("temperature=0 is greedy, and do_sample is set")
    # greedy decoding looks at none of these, and transformers would warn of each
    return out if out["do_sample"] else {k: v for k, v in out.items() if k not in DRAWING}


def merged(defaults: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """A row's parameters over the run's, whatever they are called; `stop` and `stop_strings` replace each other."""
    own = {k: v for k, v in params.items() if v is not None}
    taken = {ALIASES.get(k, k) for k in own}
    taken |= {"stop", "stop_strings"} if taken & {"stop", "stop_strings"} else set()
    return {k: v for k, v in defaults.items() if ALIASES.get(k, k) not in taken} | own


def stops_of(params: dict[str, Any]) -> list[str]:
    """Texts that end an answer and are not part of it (OpenAI's `stop`; transformers' `stop_strings` are kept)."""
    return _texts("stop", params.get("stop"))


def _texts(name: str, value: Any) -> list[str]:
    """A text or a list of texts as a list; an empty list asks for nothing."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(s, str) and s for s in texts):
        raise ValueError(f"{name}={value!r}: expected a text or a list of texts, none empty")
    return texts


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
        fields = checked(merged(self.defaults, params))
        own = {k: fields.pop(k, None) for k in EXTRAS}
        asked = "max_new_tokens" in {ALIASES.get(k, k) for k, v in params.items() if v is not None}
        cap = self._cap(len(prompt), fields, asked)
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
