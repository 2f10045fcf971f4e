# SPDX-License-Identifier: Apache-2.0
"""Stop texts in the Python API, with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diffulex import Diffulex, SamplingParams
from tiny_engine import TinyModel

PROMPTS = ["What is 3 plus 4?", "What is 2 plus 9?", "What is 5 plus 5?"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Diffulex]:
    with Diffulex("demo", max_num_reqs=4) as engine:
        yield engine


def answers(engine: Diffulex, **params: object) -> list[object]:
    fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0, **params}
    return list(
        engine.generate(PROMPTS, SamplingParams(**fields), summary=False, use_chat_template=True)
    )


def test_generate(demo: Diffulex) -> None:
    for whole, cut, kept in zip(
        answers(demo),
        answers(demo, stop=["\n####", "zzz"]),
        answers(demo, stop=["\n####"], include_stop_str_in_output=True),
        strict=True,
    ):
        assert whole.matched_stop is None
        assert cut.text == whole.text[: whole.text.index("\n####")]
        assert kept.text == cut.text + "\n####"
        for output in (cut, kept):
            assert output.completion_reason == output.finish_reason == "stop"
            assert output.matched_stop == "\n####"
            assert whole.token_ids[: len(output.token_ids)] == output.token_ids
            assert output.metrics.nfe <= whole.metrics.nfe
            assert output.metrics.completion_tokens == len(output.token_ids)
    assert not demo.has_unfinished()
    assert demo.stats().num_running == 0


@pytest.mark.parametrize("mode", ["block_append", "denoise"])
def test_stream(demo: Diffulex, mode: str) -> None:
    (cut, *_) = answers(demo, stop=["\n####"])
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, stop=["\n####"])
    events = list(demo.stream(PROMPTS[0], params, mode, use_chat_template=True))
    assert "".join(event.text for event in events) == cut.text
    assert [i for event in events for i in event.token_ids] == list(cut.token_ids)
    assert events[-1].output.text == cut.text


def test_callback_gets_the_cut_text(demo: Diffulex) -> None:
    seen: dict[int, str] = {}

    def add(event) -> None:
        seen[event.req_id] = seen.get(event.req_id, "") + event.text

    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, stop=["\n####"])
    outputs = demo.generate(
        PROMPTS, params, summary=False, use_chat_template=True, stream_callback=add
    )
    assert seen == {output.req_id: output.text for output in outputs}


def test_min_tokens(demo: Diffulex) -> None:
    """A stop text counts only behind so many tokens."""
    for whole, cut in zip(
        answers(demo), answers(demo, stop=["#", "\n", "="], min_tokens=12), strict=True
    ):
        assert len(cut.token_ids) >= 11
        assert whole.text.startswith(cut.text)


def test_special_token(demo: Diffulex) -> None:
    for output in answers(demo, stop=["<|im_end|>"], ignore_eos=False):
        assert output.matched_stop == "<|im_end|>"
        assert "<|im_end|>" not in output.text
    including = {"include_stop_str_in_output": True, "ignore_eos": False}
    for output in answers(demo, stop=["<|im_end|>"], **including):
        assert output.text.endswith("<|im_end|>")


def test_stop_ids_are_named(demo: Diffulex) -> None:
    (plain, *_) = answers(demo)
    stop_id = plain.token_ids[3]
    (output, *_) = answers(demo, stop_token_ids=[stop_id], ignore_eos=False)
    assert output.matched_stop == stop_id
    assert stop_id not in output.token_ids


def test_special_tokens_in_texts(demo: Diffulex) -> None:
    (shown, *_) = answers(demo, skip_special_tokens=False, max_tokens=24)
    (plain, *_) = answers(demo, max_tokens=24)
    assert "<|" in shown.text
    assert "<|" not in plain.text


def test_needs_a_tokenizer(tiny: TinyModel) -> None:
    with tiny.engine(has_tokenizer=False) as engine:
        with pytest.raises(ValueError, match="stop: expected an engine with a tokenizer"):
            engine.add_request([5, 6], SamplingParams(stop=["x"]))
        assert not engine.has_unfinished()


def test_abort_beside_a_match(demo: Diffulex) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, stop=["+", "="])
    ids = [demo.add_request(demo.tokenizer.encode(text), params) for text in PROMPTS]
    demo.abort(ids[1])
    done = {}
    while demo.has_unfinished():
        done.update({s.req_id: s.output for s in demo.step() if s.output is not None})
    assert set(done) == set(ids)
    assert done[ids[1]].completion_reason == "aborted"


def test_a_match_ends_the_request_in_its_step(demo: Diffulex) -> None:
    """Without a step in between, and without pages that nothing gives back."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, stop=["\n####"])
    demo.add_request([{"role": "user", "content": PROMPTS[0]}], params)
    steps = []
    while demo.has_unfinished():
        steps += demo.step()
    assert steps[-1].output.matched_stop == "\n####"
    assert steps[-1].new_tokens > 0, "the step that made the text final is the last one"
    assert "".join(step.text for step in steps) == steps[-1].output.text
    stats = demo.stats()
    assert stats.num_running == stats.num_waiting == 0


def test_text_of_steps(demo: Diffulex) -> None:
    """Ids and text are released together where text is asked for."""
    prompt = [{"role": "user", "content": PROMPTS[0]}]
    req_id = demo.add_request(prompt, SamplingParams(max_tokens=24, temperature=0), has_text=True)
    steps = []
    while demo.has_unfinished():
        steps += demo.step()
    output = steps[-1].output
    assert {step.req_id for step in steps} == {req_id}
    assert "".join(step.text for step in steps) == output.text
    assert [i for step in steps for i in step.token_ids] == list(output.token_ids)
    assert output.text == demo.tokenizer.decode(output.token_ids)


@pytest.mark.parametrize("params", [{}, {"stop": ["never said"]}])
def test_a_text_that_cannot_be_made_ends_its_request_only(
    demo: Diffulex, monkeypatch: pytest.MonkeyPatch, params: dict[str, object]
) -> None:
    first, second, _ = answers(demo)
    bad = next(token for token in first.token_ids if token not in second.token_ids)
    decode = demo.tokenizer.decode

    def broken(token_ids, *args, **options):
        if bad in token_ids:
            raise OverflowError("id too large")
        return decode(token_ids, *args, **options)

    monkeypatch.setattr(demo.tokenizer, "decode", broken)
    failed, good, _ = answers(demo, **params)
    assert (failed.completion_reason, failed.text) == ("error", "")
    assert failed.error == "OverflowError: id too large"
    assert good.text == second.text
    assert not demo.has_unfinished()
