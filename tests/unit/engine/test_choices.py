"""Several choices of one request run their prompt once; the replies are those of lone requests."""

import dataclasses

from tests.fake_model import Replies

PAGE = 8


def choices(make_request, count, **rest):
    request = make_request(3, prompt_len=30)
    return [
        dataclasses.replace(
            request,
            request_id=f"c{n}",
            sampling=dataclasses.replace(request.sampling, choice_index=n),
            **rest,
        )
        for n in range(count)
    ]


def run(engine, requests):
    replies = Replies()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        replies.take([e for e in engine.step() if type(e).__name__ in WANTED])
        engine.check_integrity()
    return replies


WANTED = ("TokenDelta", "Finished", "Failed")


def test_the_prompt_of_several_choices_is_run_once(make_engine, make_request):
    engine = make_engine(page_tokens=PAGE)
    requests = choices(make_request, 4)
    together = run(engine, requests)
    cached = [together.last[r.request_id].stats.cached_tokens for r in requests]
    assert cached == [0, 29, 29, 29]
    waited = [together.last[r.request_id].stats.waited_for for r in requests]
    assert waited == ["", "same_prompt", "same_prompt", "same_prompt"]
    for request in requests:
        alone = run(make_engine(page_tokens=PAGE), [request])
        assert together.tokens[request.request_id] == alone.tokens[request.request_id]
    assert len({tuple(together.tokens[r.request_id]) for r in requests}) == 4


def test_choices_without_reuse_run_side_by_side(make_engine, make_request):
    requests = choices(make_request, 3, reuse=False)
    together = run(make_engine(page_tokens=PAGE), requests)
    assert {together.last[r.request_id].stats.waited_for for r in requests} == {""}


def test_a_cancelled_first_choice_holds_nobody_up(make_engine, make_request):
    engine = make_engine(page_tokens=PAGE, prefill_chunk=2)
    requests = choices(make_request, 3)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.cancel("c0")
    replies = Replies()
    while engine.has_work:
        replies.take([e for e in engine.step() if type(e).__name__ in WANTED])
    assert {replies.last[f"c{n}"].reason for n in (1, 2)} == {"length"}
