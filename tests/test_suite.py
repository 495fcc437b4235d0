from selfspec import prompts, suite


def test_the_suite_mixes_kinds_and_fills_many_slots():
    ids, texts = zip(*suite.SUITE)
    assert len(set(ids)) == len(set(texts)) == len(ids) == sum(map(len, suite.KINDS.values())) >= 24
    assert [id.split("/")[0] for id in ids[: len(suite.KINDS)]] == list(suite.KINDS)  # also with --limit
    assert {p.id for p in prompts.builtin()} == set(ids)


def test_long_prompts_are_long_and_do_not_repeat_a_line():
    for text in suite.LONG:
        lines = [line.partition(". ")[2] for line in text.splitlines() if line.startswith("Day ")]
        assert len(text) > 2000 and len(set(lines)) == len(lines)
    assert max(len(t) for name, texts in suite.KINDS.items() if name != "long" for t in texts) < 1000
