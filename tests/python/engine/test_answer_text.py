# SPDX-License-Identifier: Apache-2.0
"""Text that is released when it is final, and cut at stop texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffulex import SamplingParams
from diffulex.checkpoint.detokenizer import IncrementalDecoder, robust_decode
from diffulex.engine.answer_text import AnswerText, Piece
from diffulex.engine.answers import RequestEnd, close, deliver, open_record


def decode(token_ids) -> str:
    return bytes(token_ids).decode(errors="replace")


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop text that is complete first, the longest of several."""
    ends = [
        (end, end - len(stop))
        for end in range(1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    return None if not ends else (min(ends)[1], min(ends)[0])


chunks = st.lists(st.lists(st.sampled_from(list(b"aab\nc")), max_size=4), max_size=12)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    chunks=chunks,
    stops=st.lists(st.sampled_from(["a", "ab", "ba", "aab", "b\n", "ca", "abab"]), max_size=3),
    include=st.booleans(),
)
def test_cuts_where_a_search_of_the_whole_text_does(chunks, stops, include):
    answer = AnswerText(decode, stops, include)
    pieces = [answer.push(chunk) for chunk in chunks] + [answer.finish()]
    whole = decode([token for chunk in chunks for token in chunk])
    match = first_match(whole, stops)
    expected = whole if match is None else whole[: match[1] if include else match[0]]
    assert answer.text == expected == "".join(piece.text for piece in pieces)
    assert answer.token_ids == [token for piece in pieces for token in piece.token_ids]
    assert decode(answer.token_ids) == expected  # one character per token here
    assert (answer.matched_stop is None) == (match is None)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="aé€🙂\n", max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.sampled_from(["é", "€🙂", "a\n"]), max_size=2),
)
def test_characters_over_several_tokens(text, cuts, stops):
    ids = list(text.encode())
    cuts = sorted(min(cut, len(ids)) for cut in cuts)
    answer = AnswerText(decode, stops)
    sent = ""
    for begin, end in zip([0, *cuts], [*cuts, len(ids)]):
        piece = answer.push(ids[begin:end])
        sent += piece.text
        assert "\ufffd" not in sent
    sent += answer.finish().text
    match = first_match(text, stops)
    assert sent == answer.text == (text if match is None else text[: match[0]])
    # Tokens cover the text, and one fewer would not.
    assert decode(answer.token_ids).startswith(sent)
    assert not answer.token_ids or len(decode(answer.token_ids[:-1]).rstrip("\ufffd")) < len(sent)


def test_what_may_become_a_stop_text_is_held_back():
    answer = AnswerText(decode, ["\n\nQ:"])
    assert answer.push(list(b"ab\n")) == Piece((97, 98), "ab")
    assert answer.push(list(b"\nQ")) == Piece((), "")
    assert answer.push(list(b"x")) == Piece(tuple(b"\n\nQx"), "\n\nQx")
    assert answer.push(list(b"\n\nQ:y")) == Piece((), "")
    assert answer.matched_stop == "\n\nQ:"
    assert answer.push(list(b"zz")) == Piece((), "")
    assert answer.finish() == Piece((), "")


def test_tokens_of_several_characters():
    words = {1: "hello ", 2: "wor", 3: "ld. ", 4: "bye"}
    answer = AnswerText(lambda ids: "".join(words[i] for i in ids), [". "])
    answer.push([1, 2, 3, 4])
    # The kept text ends inside token 3, which is needed to cover it.
    assert (answer.text, answer.token_ids) == ("hello world", [1, 2, 3])


def test_without_a_tokenizer():
    answer = AnswerText(None, ["a"])
    assert answer.push([97]) == Piece((97,), "")
    assert answer.finish() == Piece((), "")


def test_ids_without_text_are_empty():
    class Holes:
        def decode(self, ids):
            if 9 in ids:
                raise TypeError
            return "x" * len(ids)

    assert robust_decode(Holes())([1, 9, 2]) == "xx"
    decoder = IncrementalDecoder(robust_decode(Holes()))
    assert decoder.push([1]) + decoder.push([9]) + decoder.push([2]) + decoder.flush() == "xx"


def byte_fallback_decode(token_ids) -> str:
    """As tokenizers with byte tokens do: one bad byte spoils the whole run of byte tokens."""
    text, run = "", b""
    for token in [*token_ids, None]:
        if token is not None and token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run = b""
        text += "" if token is None else chr(token - 256)
    return text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="aé€🙂\n", max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=40),
    stops=st.lists(st.sampled_from(["é", "€🙂", "a\n"]), max_size=2),
)
def test_runs_of_byte_tokens(text, cuts, stops):
    """Only the letter has a token of its own."""
    ids = [i for char in text for i in ([256 + ord(char)] if char == "a" else char.encode())]
    cuts = sorted(min(cut, len(ids)) for cut in cuts)
    answer = AnswerText(byte_fallback_decode, stops)
    sent, tokens = "", []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)]):
        piece = answer.push(ids[begin:end])
        sent, tokens = sent + piece.text, tokens + list(piece.token_ids)
        assert byte_fallback_decode(tokens) == sent  # ids and text advance together
    piece = answer.finish()
    match = first_match(text, stops)
    assert sent + piece.text == answer.text == (text if match is None else text[: match[0]])
    assert tokens + list(piece.token_ids) == answer.token_ids


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="aé€😀", max_size=8),
    cuts=st.lists(st.integers(1, 4), max_size=12),
    special=st.lists(st.integers(0, 20), max_size=4),
    stops=st.sampled_from([(), ("a€",)]),
)
def test_spans_put_together_are_the_text(text, cuts, special, stops):
    """Also where a character has several tokens, and where tokens have no text."""
    tokens = list(text.encode())
    for place in special:
        tokens.insert(min(place, len(tokens)), 256)

    def decode(token_ids):
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    answer = AnswerText(decode, stops, has_spans=True)
    begin = 0
    for cut in [*cuts, len(tokens)]:
        answer.push(tokens[begin : begin + cut])
        begin += cut
    answer.finish()
    spans = [answer.span(index) for index in range(len(answer.token_ids))]
    assert "".join(piece for _, piece in spans) == answer.text
    begins = [begin for begin, _ in spans]
    assert begins == [sum(len(piece) for _, piece in spans[:i]) for i in range(len(spans))]


def test_spans_must_be_asked_for():
    answer = AnswerText(decode)
    answer.push([97])
    assert answer.span(0) is None


@pytest.mark.parametrize("has_text", [True, False])
def test_only_the_failures_of_a_tokenizer_end_a_request(has_text):
    def bad_decode(token_ids):
        raise OverflowError("id too large")

    def bad_logprobs(begin, count):
        raise KeyError("row")

    def ended(decode, *logprobs_of):
        params = SamplingParams(max_tokens=4, logprobs=0)
        record = open_record(1, (98,), params, decode, {}, has_text=has_text, added_at=0.0)
        end = RequestEnd((97,), "max_new_tokens_reached", (97,))
        return close(record, deliver(record, (97,), 1), end, *logprobs_of).output

    assert (ended(decode).text, ended(decode).full_text) == ("a", "ba")
    failed = ended(bad_decode)
    assert (failed.completion_reason, failed.error) == ("error", "OverflowError: id too large")
    with pytest.raises(KeyError, match="row"):
        ended(decode, bad_logprobs)


def test_tokens_without_text_are_not_released_before_a_stop_text():
    """The pieces are the answer, whenever its tokens come."""

    def without_specials(token_ids) -> str:
        return decode([token for token in token_ids if token < 256])

    for chunks in ([[97, 300], [98]], [[97, 300, 98]], [[97], [300], [98]]):
        answer = AnswerText(without_specials, ("b",))
        pieces = [*map(answer.push, chunks), answer.finish()]
        assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids == [97]
        assert answer.text == "a"
    answer = AnswerText(without_specials, ("b",))
    pieces = [*map(answer.push, [[97, 300], [99]]), answer.finish()]
    assert [token for piece in pieces for token in piece.token_ids] == [97, 300, 99]
