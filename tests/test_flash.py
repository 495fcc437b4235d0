"""flash-attn's backend: a plain stand-in for the library on a CPU, the library itself where it is installed."""

import sys
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_session import Replayed
from tiny import RAGGED, SLIGHT, model_of, path_of, reference, run

from selfspec import attention, info, rows
from selfspec.attention import AttentionRule
from selfspec.backbone import Backbone
from selfspec.cache import PrefixCache
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.rows import RowLayout
from selfspec.session import Request, Session
from selfspec.shadow import UnsupportedModel
from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer
from selfspec.training.step import compile_layers
from selfspec.training.trainer import Trainer

MODULE = "selfspec.attention.flash"


def flash_attn_varlen_func(
    q,
    k,
    v,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
):
    """The library's documented results, one sequence at a time; causality and window count from the end of the keys."""
    assert causal and (cu_seqlens_q is None) == (max_seqlen_q is None) == (max_seqlen_k is None)
    out = q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"))
    if cu_seqlens_q is None:
        assert seqused_k.dtype == torch.int32 and seqused_k.shape == q.shape[:1] and int(seqused_k.max()) <= k.shape[1]
        pairs = [(out[n], q[n], k[n, :m], v[n, :m]) for n, m in enumerate(seqused_k.tolist())]
    else:
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        bounds = cu_seqlens_q.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(q)
        pairs = [(out[a:b], q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    for into, query, keys, values in pairs:
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("rhd,khd->hrk", query, keys) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        place = torch.arange(len(query))[:, None] + len(keys) - len(query)
        slot = torch.arange(len(keys))
        hidden = slot > place
        if window_size[0] is not None:
            assert window_size[1] == 0
            hidden |= slot < place - window_size[0]
        scores = scores.masked_fill(hidden, -float("inf"))
        if learnable_sink is not None:
            scores = torch.cat([scores, learnable_sink[:, None, None].expand(-1, len(query), 1).to(scores)], -1)
        into.copy_(torch.einsum("hrk,khd->rhd", scores.softmax(-1)[..., : len(keys)], values))
    return out, None


def forget():
    """Let the next one who asks load the backend anew: its operator is whosoever registered it last."""
    sys.modules.pop(MODULE, None)
    attention.backend.cache_clear()


@pytest.fixture
def flash(monkeypatch):
    """The backend over the stand-in, with calls counted, on the CPU, for short chains and any dtype."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return flash_attn_varlen_func(*args, **kwargs)

    cute = ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = counted
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    forget()
    module = attention.backend("flash")
    module.DEVICES, module.DTYPES, module.LEAST, module.calls = ("cpu",), (torch.float64, torch.float32), 4, calls
    yield module
    forget()


def tensors(layout, n_keys, heads=(4, 2), d=16, dtype=torch.float64, held=None):
    generator = torch.Generator().manual_seed(n_keys)
    n, (h, hkv) = layout.n_requests, heads
    q = torch.randn(n, layout.n_rows, h, d, generator=generator, dtype=dtype).transpose(1, 2)
    k, v = (
        torch.randn(held or n, hkv, n_keys + 3, d, generator=generator, dtype=dtype)[:, :, :n_keys] for _ in range(2)
    )
    return q, k, v


def packed(n, s, seed=0):
    """Rows of whole documents, and nothing at some rows' ends."""
    generator = torch.Generator().manual_seed(seed)
    positions, segments = torch.zeros(n, s, dtype=torch.long), torch.full((n, s), -1)
    for row in range(n):
        at, document = 0, 0
        while at < s - 6:
            size = min(int(torch.randint(1, 20, (1,), generator=generator)), s - at)
            positions[row, at : at + size], segments[row, at : at + size] = torch.arange(size), document
            at, document = at + size, document + 1
    return RowLayout(positions, torch.zeros(n, dtype=torch.long), s, segments=segments)


HOW = [(None, None, False), (7, None, False), (None, 5.0, False), (3, None, True), (None, 4.0, True)]


@pytest.mark.parametrize("window,softcap,sinks", HOW)
@pytest.mark.parametrize("seed", range(3))
def test_prefill_over_a_prefix_is_what_sdpa_gives(flash, window, softcap, sinks, seed):
    generator = torch.Generator().manual_seed(seed)
    layout = rows.chain(torch.randint(0, 40, (3,), generator=generator), 9)
    n_keys = int(layout.start.max()) + 9 + 2 * seed  # a graph reads more slots than there are
    q, k, v = tensors(layout, n_keys)
    sink = torch.randn(4, generator=generator, dtype=q.dtype) if sinks else None
    want, got = (
        AttentionRule(layout, n_keys, name).run(q, k, v, window, 0.3, softcap, sink) for name in ("sdpa", "flash")
    )
    torch.testing.assert_close(got, want)
    assert len(flash.calls) == 1


@pytest.mark.parametrize("window,softcap,sinks", HOW)
@pytest.mark.parametrize("s", [32, 100])
def test_packed_documents_are_what_sdpa_gives(flash, window, softcap, sinks, s):
    layout = packed(3, s, seed=s)
    q, k, v = (x.contiguous() for x in tensors(layout, s))
    sink = torch.linspace(-1, 1, 4, dtype=q.dtype) if sinks else None
    want, got = (AttentionRule(layout, s, name).run(q, k, v, window, 0.3, softcap, sink) for name in ("sdpa", "flash"))
    real = (layout.segments >= 0)[:, None, :, None]
    torch.testing.assert_close(got * real, want * real)
    assert len(flash.calls) == 1


def test_documents_are_counted_up_to_few_sizes(flash):
    sizes = set()
    for seed in range(4):
        layout = packed(8, 64, seed)
        used, ends = flash.lengths(layout)
        starts = ((layout.positions == 0) & (layout.segments >= 0)).flatten().nonzero()[:, 0]
        assert used is None and set(starts.tolist()) <= set(ends.tolist())
        assert ends[0] == 0 and ends[-1] == 8 * 64 and (ends.diff() >= 0).all()
        sizes.add(len(ends))
    assert len(sizes) == 1 and sizes <= {65, 129}
    many = RowLayout(
        torch.zeros(1, 70, dtype=torch.long), torch.zeros(1, dtype=torch.long), 70, segments=torch.arange(70)[None]
    )
    assert len(flash.lengths(many).ends) == 129


def test_the_first_slot_may_be_known_to_the_device_alone(flash):
    layout = rows.chain(torch.tensor([5, 0]), 6)
    q, k, v = tensors(layout, 11, held=4)
    want = AttentionRule(layout, 11).run(q, k[1:3], v[1:3], None, 0.3, None, None)
    rule = AttentionRule(layout, 11, "flash")
    rule.base = torch.tensor([1, 2])
    torch.testing.assert_close(rule.run(q, k, v, None, 0.3, None, None), want)


def test_requests_may_stand_in_any_slots_and_one_that_fills_the_batch_reads_no_further_than_the_keys(flash):
    layout = rows.chain(torch.tensor([5, 0, 9]), 6)  # the last one's rows stand behind the 11 keys
    q, k, v = tensors(layout, 11, held=4)
    which = torch.tensor([3, 0, 2])
    rule = AttentionRule(layout, 11, "flash")
    rule.base = which
    ours = rule.run(q, k, v, None, 0.3, None, None)
    two = rows.chain(torch.tensor([5, 0]), 6)
    want = AttentionRule(two, 11).run(q[:2], k[which[:2]], v[which[:2]], None, 0.3, None, None)
    torch.testing.assert_close(ours[:2], want)
    assert int(rule.lengths().used.max()) == 15 and ours.isfinite().all()


START = torch.tensor([7, 4])
OTHERS = {
    "short": rows.chain(START, 3),
    "tree": rows.tree(START, torch.tensor([[-1, 0, 0, 1, 2]] * 2)),
    "block": rows.block(START, 6),
    "overlap": rows.overlapped(rows.chain(START, 5), torch.tensor([[0, 3], [2, -1]]), 4),
    "prefix": rows.chain(START, 5, segments=torch.zeros(2, 5, dtype=torch.long)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_flash_cannot_take_runs_elsewhere(flash, kind):
    layout = OTHERS[kind]
    n_keys = 7 + layout.n_rows
    rule = AttentionRule(layout, n_keys, "flash").prepare([None])
    assert rule.backend is attention.backend("sdpa")
    q, k, v = tensors(layout, n_keys)
    want = AttentionRule(layout, n_keys).run(q, k, v, None, 0.3, None, None)
    assert torch.equal(rule.run(q, k, v, None, 0.3, None, None), want) and not flash.calls


@pytest.mark.parametrize("packs,name", [(False, "triton"), (True, "flex")])
def test_on_a_gpu_the_usual_kernels_stand_in(flash, packs, name):
    if name == "triton":
        pytest.importorskip("triton")
    segments = torch.zeros(2, 5) if packs else None
    there = SimpleNamespace(device=torch.device("cuda"))
    layout = SimpleNamespace(positions=there, n_draft=5, segments=segments, key_positions=None)
    assert attention.stands_in("flash", layout, 16) is attention.backend(name)
    assert attention.by_triton("flash") and not attention.by_triton("sdpa")


@pytest.mark.parametrize("mode", ["ar", "sequential", "overlap+tree"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_a_session_prefills_by_flash_and_answers_the_same(flash, family, mode):
    model = model_of(family)
    truth = reference(model, RAGGED, 12)
    session = Session(Backbone(model, path_of(model, 0.2), "flash"), Plan(mode, 4, 8), 3, 64, graphs=False)
    requests = [Request(p, 12) for p in RAGGED]
    before = len(flash.calls)
    run(session, requests)
    assert [r.output for r in requests] == truth and len(flash.calls) > before


def test_a_session_with_graphs_prefills_by_flash(flash):
    model = model_of()
    truth = reference(model, RAGGED, 6)
    flash.LEAST = 16  # as wide as the narrowest prefill of a graph, wider than any round
    session = Session(Backbone(model, path_of(model, 0.2), "flash"), Plan("sequential", 4, 8), 3, 64, graphs=Replayed())
    requests = [Request(p, 6) for p in RAGGED]
    run(session, requests[:1], requests[1:])
    assert [r.output for r in requests] == truth
    prefills = {k: inputs for k, inputs in session.graphs.inputs.items() if k[0] == "prefill"}
    assert prefills and all(k[1].first == 0 and len(inputs) == 2 for k, inputs in prefills.items())  # for all slots
    assert flash.calls and all(shape[1] >= 16 for shape in flash.calls)


def test_the_clean_pass_of_a_training_step_runs_by_flash_compiled_too(flash):
    from torch._dynamo.testing import CompileCounter

    model = model_of("Llama", torch.float32)
    layout = packed(2, 48)
    tokens = torch.arange(96).view(2, 48) % 24
    want = Backbone(model, backend="sdpa")(layout, PrefixCache(4), tokens).clean
    backbone = Backbone(model, backend="flash")
    real = (layout.segments >= 0)[..., None]
    with torch.no_grad():
        torch.testing.assert_close(
            backbone(layout, PrefixCache(4), tokens).clean * real, want * real, rtol=1e-4, atol=1e-5
        )
        torch._dynamo.reset()
        counter, before = CompileCounter(), len(flash.calls)
        compile_layers(backbone, backend=counter, fullgraph=True)
        for seed in range(3):  # as many documents or not: no layer is compiled again
            other = packed(2, 48, seed)
            backbone(other, PrefixCache(4), tokens)
        torch.testing.assert_close(
            backbone(layout, PrefixCache(4), tokens).clean * real, want * real, rtol=1e-4, atol=1e-5
        )
    assert counter.frame_count == 1 and len(flash.calls) == before + 4 * 4


def test_a_trainer_takes_the_same_steps_with_flash(flash, tmp_path):
    flash.LEAST = 16  # more than a new backbone's probe has
    answers = [Answer(str(i), list(range(1, 4 + i)), list(range(5, 14 + i))) for i in range(8)]
    fields = dict(adapter={"block_size": 4}, length=48, rows=2, anchors=8, max_steps=8, valid_docs=2, eval_every=0,
                  save_every=0, dtype="float32", fit=0.0, tensorboard=False)  # fmt: skip
    losses = []
    for name in ("sdpa", "flash"):
        config = TrainConfig.from_dict(fields | {"out": str(tmp_path / name), "attention": name})
        trainer = Trainer(config, model_of("Llama", torch.float32), answers)
        losses.append([float(trainer.train_step()["loss"]) for _ in range(3)])
        trainer.batches.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(flash.calls) == 3 * 4  # four layers, clean rows alone
    with pytest.raises(ValueError, match="counts the documents of every step"):
        TrainConfig.from_dict({"attention": "flash", "graph": True})


def test_a_model_prefills_by_flash_when_asked_to(flash):
    flash.LEAST = 10  # as many as the prompt
    model, ids = model_of("Llama", torch.float32, **SLIGHT), torch.tensor(RAGGED[:1])
    plain, fast = (
        SelfSpecModel(model, attention=name).generate(ids, max_new_tokens=8, mode="ar", do_sample=False)
        for name in ("sdpa", "flash")
    )
    assert torch.equal(plain, fast) and len(flash.calls) == 1


def test_exact_mode_refuses_flash(flash):
    with pytest.raises(UnsupportedModel, match="exact mode is not available"):
        SelfSpecModel(model_of("Llama", torch.float32), exact=True, attention="flash")


@pytest.mark.parametrize(
    "dtype,d,words",
    [(torch.float16, 16, "float64 and float32 on CUDA, not float16"), (torch.float32, 20, "multiples of 8 up to 256")],
)
def test_tensors_that_flash_does_not_take_are_refused(flash, dtype, d, words):
    layout = rows.chain(START, 5)
    q, k, v = tensors(layout, 12, d=d, dtype=torch.float32)
    with pytest.raises(ValueError, match=words):
        AttentionRule(layout, 12, "flash").run(*(x.to(dtype) for x in (q, k, v)), None, 0.3, None, None)


def test_a_gradient_is_refused_rather_than_lost(flash):
    layout = rows.chain(START, 5)
    q, k, v = tensors(layout, 12)
    with pytest.raises(ValueError, match="no gradient"):
        AttentionRule(layout, 12, "flash").run(q, k.requires_grad_(), v, None, 0.3, None, None)


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    forget()
    yield
    forget()


def test_without_the_library_asking_for_it_says_what_to_install(absent):
    with pytest.raises(ValueError, match=r"'flash' cannot be loaded here .*pip install 'selfspec\[flash\]'"):
        Backbone(model_of(), backend="flash")
    assert attention.best(torch.device("cuda"), torch.bfloat16) != "flash"


def test_without_the_library_everything_else_runs(absent):
    model = model_of()
    session = Session(Backbone(model, path_of(model, 0.2)), Plan("sequential", 4, 8), 3, 64)
    requests = [Request(p, 6) for p in RAGGED]
    run(session, requests)
    assert [r.output for r in requests] == reference(model, RAGGED, 6)
    assert "pip install" in info.backends()["flash"]


@pytest.mark.gpu
@pytest.mark.parametrize("window,softcap,sinks", HOW)
@pytest.mark.parametrize("heads,d", [((9, 3), 64), ((32, 8), 128)])
@pytest.mark.parametrize("packs", [False, True])
def test_the_library_is_as_near_to_float64_as_torch_is(window, softcap, sinks, heads, d, packs):
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        pytest.skip("flash-attn-4 is not installed")
    device, s = torch.device("cuda"), 300
    window = window and 16 * window
    layout = packed(2, s) if packs else rows.chain(torch.tensor([0, 777]), s)
    n_keys = s if packs else 777 + s + 5
    held = None if packs else 4
    q, k, v = (x.to(device, torch.bfloat16) for x in tensors(layout, n_keys, heads, d, torch.float32, held))
    layout = RowLayout(**{f: x.to(device) if isinstance(x, torch.Tensor) else x for f, x in vars(layout).items()})
    sink = torch.randn(heads[0], device=device, dtype=torch.bfloat16) if sinks else None
    for first in (None, 1) if held else (None,):  # by a view of two slots, and by a slot that only the device knows
        at = slice(first or 0, (first or 0) + 2)
        exact = AttentionRule(layout, n_keys).run(
            q.double(),
            k[at].double(),
            v[at].double(),
            window,
            d**-0.5,
            softcap,
            None if sink is None else sink.double(),
        )
        rule = AttentionRule(layout, n_keys, "flash")
        if first is not None:
            rule.base = torch.tensor([first, first + 1], device=device)
        ours = rule.run(q, *((k, v) if first is not None else (k[at], v[at])), window, d**-0.5, softcap, sink)
        torchs = AttentionRule(layout, n_keys).run(q, k[at], v[at], window, d**-0.5, softcap, sink)
        real = 1 if layout.segments is None else (layout.segments >= 0)[:, None, :, None]
        assert ((ours - exact) * real).norm() < 1.5 * ((torchs - exact) * real).norm()
