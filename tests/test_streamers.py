"""Streamers get the prompt, then what each round commits."""

import pytest
import torch
from test_generate import MODES, ONE, speculative
from tiny import PROMPT, OraclePath, model_of, reference
from transformers import TextStreamer

from selfspec import SelfSpecModel

pytestmark = pytest.mark.usefixtures("chains")


def test_a_streamer_sees_nothing_of_a_call_that_is_refused():
    """It got the prompt before the arguments were checked, and waited for an end that never came."""
    for bad in (dict(mode="nonsense"), dict(slots=0), dict(do_sample=True, verify="block", mode="tree"),
                dict(do_sample=True, verify="block", logits_processor=[lambda i, s: s])):  # fmt: skip
        recorder = Recorder()
        with pytest.raises(ValueError):
            speculative().generate(ONE, max_new_tokens=4, streamer=recorder, **bad)
        assert not recorder.pieces and not recorder.ended


class Recorder:
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.pieces.append(value.clone())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eos", [None, 7])
def test_a_streamer_gets_the_prompt_and_then_each_round(mode, eos):
    decoder, recorder = speculative(), Recorder()
    out = decoder.generate(ONE, max_new_tokens=11, eos_token_id=eos, streamer=recorder, mode=mode)
    assert torch.equal(recorder.pieces[0], ONE) and recorder.ended == 1
    assert torch.cat([p.reshape(-1) for p in recorder.pieces]).tolist() == out[0].tolist()
    stats = decoder.stats
    assert len(recorder.pieces[1]) == 1  # the prefill's token at once
    assert sorted(len(p) for p in recorder.pieces[2:]) == sorted(stats.accepted.elements())


def test_a_streamer_of_blocks():
    model = model_of()
    path = OraclePath(model, {}, 4)
    decoder, recorder = SelfSpecModel(model, path), Recorder()
    answer = reference(model, [PROMPT], 30)[0]

    class Anyone(dict):
        def __missing__(self, request):
            return answer

    path.truth = Anyone()
    made, real = [], __import__("selfspec.session", fromlist=["Session"]).Session.add

    def add(session, requests):
        path.session = session
        made.append(session)
        return real(session, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.session.Session.add", add)
        decoder.generate(ONE, max_new_tokens=9, streamer=recorder)
    assert [p.tolist() for p in recorder.pieces[1:]] == [answer[:1], answer[1:6], answer[6:9]]


def test_transformers_own_streamer(capsys):
    class Tokenizer:
        def decode(self, ids, **kwargs):
            return " ".join(map(str, ids)) + " "

    out = speculative().generate(ONE, max_new_tokens=9, streamer=TextStreamer(Tokenizer(), skip_prompt=True))
    assert capsys.readouterr().out.split() == [str(t) for t in out[0, 10:].tolist()]


def test_a_streamer_takes_one_prompt():
    with pytest.raises(ValueError, match="one prompt"):
        speculative().generate(torch.tensor([PROMPT, PROMPT]), max_new_tokens=3, streamer=Recorder())
