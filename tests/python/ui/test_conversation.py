# SPDX-License-Identifier: Apache-2.0
"""Conversations on the page: memory, errors, repeated and changed questions, history, programs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fixtures.live_server import LiveServer, running_server
from fixtures.processes import until
from fixtures.ui_page import (
    LONG_QUESTION,
    QUESTION,
    ask,
    metric,
    open_page,
    open_unwatched,
    set_settings,
    wait_for_end,
)

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

_ATTACK = "<img src=x onerror='window.attacked = 1'><script>window.attacked = 1</script>"
#: Renders every turn, unlike the bundled model's own.
_TURNS_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


@pytest.fixture(scope="module")
def turns_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bundled model with a template that renders a whole conversation."""
    file = tmp_path_factory.mktemp("template") / "turns.jinja"
    file.write_text(_TURNS_TEMPLATE, encoding="utf-8")
    with running_server("--device", "cpu", "--chat-template", str(file)) as running:
        yield running


def refuse_silently(page: Any) -> list[str]:
    """Errors of the page's own scripts: the browser itself reports answers of 400 on its console."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors


def sent_messages(page: Any, question: str) -> list[dict[str, str]]:
    """The messages that a question is sent with."""
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, question)
    messages: list[dict[str, str]] = sent.value.post_data_json["messages"]
    return messages


# Memory.


def test_earlier_turns_are_sent_where_the_template_renders_them(
    turns_server: LiveServer, browser: Any
) -> None:
    with open_page(turns_server, browser) as page:
        switch = page.get_by_role("switch", name="Remember earlier turns")
        assert switch.is_checked()
        assert switch.is_visible()
        set_settings(page, formats=False, system="Be brief.", max_tokens="12")
        first = ask(page, QUESTION)
        messages = sent_messages(page, "And if he eats 2?")
        assert messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And if he eats 2?"},
        ]
        switch.uncheck()
        assert len(sent_messages(page, QUESTION)) == 2


def test_one_turn_templates_are_found_by_asking(page: Any) -> None:
    """The bundled model's template drops earlier turns: the page says so, and sends none."""
    switch = page.get_by_role("switch", name="Remember earlier turns")
    assert switch.is_disabled()
    assert not switch.is_checked()
    assert "one question at a time" in page.locator("#memory-note").inner_text()
    ask(page, QUESTION)
    assert sent_messages(page, LONG_QUESTION) == [{"role": "user", "content": LONG_QUESTION}]


# Errors.


def test_refusal_is_shown_once_beside_the_kept_question(server: LiveServer, browser: Any) -> None:
    page = open_unwatched(server, browser, viewport={"width": 1280, "height": 800})
    errors = refuse_silently(page)
    set_settings(page, max_tokens="5000")
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    notice = page.locator("#notice", has_text="5000")
    notice.wait_for()
    assert notice.get_attribute("role") == "alert"
    assert page.get_by_text("5000").count() == 1
    assert page.locator("#question").input_value() == QUESTION
    # Nothing looks like work in progress, and nothing can be saved.
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()
    assert not page.locator("#inspector").is_visible()
    assert metric_texts(page) == {"\u2013"}
    assert page.locator("#export-json").is_disabled()
    box, composer = notice.bounding_box(), page.locator("#question").bounding_box()
    assert 0 <= composer["y"] - box["y"] - box["height"] < 40
    set_settings(page, max_tokens="")
    page.locator("#question").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert not page.locator("#notice").is_visible()
    assert errors == []
    page.context.close()


def metric_texts(page: Any) -> set[str]:
    return set(page.locator("[data-metric]").all_text_contents())


def test_refusal_names_the_setting(server: LiveServer, browser: Any) -> None:
    """A value that the browser lets pass: the server's words, behind the name on the page."""
    page = open_unwatched(server, browser)
    refused = {"message": "top_p: expected more than 0, got 0", "code": "x", "param": "top_p"}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json={"error": refused}),
    )
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="Settings, Top-p: expected more than 0, got 0").wait_for()
    page.context.close()


def test_length_is_shown_before_it_is_exceeded(server: LiveServer, browser: Any) -> None:
    page = open_unwatched(server, browser)
    budget = page.locator("#budget")
    page.locator("#question").fill(QUESTION)
    page.locator("#budget", has_text="of 511 tokens").wait_for()
    page.locator("#question").fill(QUESTION * 40)
    page.locator('#budget[data-level="over"]', has_text="Too long by").wait_for()
    page.locator("#question").fill(QUESTION * 1000)
    page.locator("#budget", has_text="characters").wait_for()
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="too long for the model").wait_for()
    assert page.locator("#question").input_value() == QUESTION * 1000
    page.locator("#question").fill("")
    page.locator("#budget:empty").wait_for(state="attached")
    assert budget.inner_text() == ""
    page.context.close()


def test_server_that_is_away_is_said_in_words(server: LiveServer, browser: Any) -> None:
    page = open_unwatched(server, browser)
    ask(page, QUESTION)
    page.route("**/health", lambda route: route.abort())
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.locator("#question").fill(LONG_QUESTION)
    page.keyboard.press("Enter")
    away = page.locator("#away", has_text="The server does not answer.")
    away.wait_for()
    assert away.get_attribute("role") == "status"
    assert page.locator("#state").inner_text() == "not ready"
    # The page may have found that out by itself, before the question.
    page.locator("#notice", has_text="cannot be reached").wait_for()
    assert page.locator("#notice").inner_text() == "The server cannot be reached."
    assert page.locator("#question").input_value() == LONG_QUESTION
    assert page.locator(".message.assistant").count() == 1
    page.unroute("**/health")
    page.unroute("**/v1/chat/completions")
    away.wait_for(state="hidden")
    page.locator("#notice").wait_for(state="hidden")
    assert page.locator("#state").inner_text() == "ready"
    page.context.close()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("starting", "is loading the model"),
        ("stuck", "is stuck in a step"),
        ("?", "takes no requests"),
    ],
)
def test_states_of_a_server_have_words(
    server: LiveServer, browser: Any, state: str, words: str
) -> None:
    page = open_unwatched(server, browser)
    page.route("**/health", lambda route: route.fulfill(status=503, json={"status": state}))
    page.reload()
    page.locator("#away", has_text=f"The server {words}.").wait_for()
    page.context.close()


def test_answer_that_breaks_off_is_kept(server: LiveServer, browser: Any) -> None:
    """What came stays; the question is not put back, as the answer can be made anew."""
    page = open_unwatched(server, browser)
    chunk = json.dumps({"choices": [{"delta": {"content": "half an ans"}}]})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=f"data: {chunk}\n\n", content_type="text/event-stream"),
    )
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator(".message.assistant .foot", has_text="broke off").wait_for()
    assert page.locator(".message.assistant .text").inner_text() == "half an ans"
    page.locator("#notice", has_text="connection was lost").wait_for()
    assert page.locator("#question").input_value() == ""
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".message.assistant .foot", has_text="tokens in").wait_for()
    assert page.locator(".message").count() == 2
    assert page.locator(".message.assistant .text").inner_text().splitlines()[-1] == "7"
    page.context.close()


# Copy, regenerate, edit.


def test_texts_are_copied(server: LiveServer, browser: Any) -> None:
    granted = {"permissions": ["clipboard-read", "clipboard-write"]}
    with open_page(server, browser, **granted) as page:
        ask(page, QUESTION)
        for message, text in ((".user", QUESTION), (".assistant", "3+4=7\n#### 7")):
            page.locator(message).get_by_role("button", name="Copy the text").click()
            page.locator(message).get_by_text("Copied").wait_for()
            assert page.evaluate("navigator.clipboard.readText()") == text


def test_last_answer_is_made_anew(page: Any) -> None:
    ask(page, QUESTION)
    ask(page, LONG_QUESTION)
    assert page.get_by_role("button", name="Regenerate").count() == 1
    page.get_by_role("button", name="Regenerate").click()
    # Greedy decoding gives the same again: without a word that would look like nothing happened.
    page.locator(".note", has_text="the same as before: temperature 0 leaves no choice").wait_for()
    assert page.locator(".message.assistant").count() == 2
    assert page.locator(".message.user .text").all_inner_texts() == [QUESTION, LONG_QUESTION]


def test_question_is_changed_and_asked_again(page: Any) -> None:
    ask(page, QUESTION)
    ask(page, LONG_QUESTION)
    page.get_by_role("button", name="Edit").first.click()
    assert page.locator("#editing").is_visible()
    box = page.locator("#question")
    assert box.input_value() == QUESTION
    page.get_by_role("button", name="Keep them").click()
    assert box.input_value() == ""
    assert page.locator(".message.assistant").count() == 2

    page.get_by_role("button", name="Edit").first.click()
    box.fill(QUESTION.replace("3", "5"))
    page.keyboard.press("Enter")
    page.locator(".message.assistant").nth(1).wait_for(state="detached")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert not page.locator("#editing").is_visible()
    assert page.locator(".message").count() == 2
    assert page.locator(".message.assistant .text").inner_text().splitlines()[-1] == "9"


def test_refused_change_leaves_what_was_there(server: LiveServer, browser: Any) -> None:
    page = open_unwatched(server, browser)
    ask(page, QUESTION)
    ask(page, LONG_QUESTION)
    before = page.locator("#messages").inner_text()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}),
    )
    page.get_by_role("button", name="Edit").first.click()
    page.locator("#question").fill("changed")
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="The server is busy").wait_for()
    assert page.locator("#messages").inner_text() == before
    assert page.locator("#question").input_value() == "changed"
    assert page.locator("#editing").is_visible()
    page.context.close()


@pytest.mark.parametrize("way", ["Regenerate", "Edit", "changed"])
def test_stop_before_the_first_text_leaves_what_was_there(
    server: LiveServer, browser: Any, way: str
) -> None:
    """Answers are replaced once the new one begins: one that was stopped before that never began."""
    page = open_unwatched(server, browser)
    ask(page, QUESTION)
    ask(page, LONG_QUESTION)
    before = page.locator("#messages").inner_text()
    stored = {"chats": 1, "recordings": 2}
    wait_for_stored(page, stored)
    page.route("**/v1/chat/completions", lambda route: None)  # never answers
    with page.expect_request("**/v1/chat/completions"):
        if way == "Regenerate":
            page.get_by_role("button", name="Regenerate").click()
        else:
            page.get_by_role("button", name="Edit").first.click()
            if way == "changed":
                page.locator("#question").fill("changed")
            page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator("#messages").inner_text() == before
    # A question that stands nowhere else is put back; being stopped is no error.
    assert page.locator("#question").input_value() == ("changed" if way == "changed" else "")
    assert page.locator("#editing").is_visible() == (way == "changed")
    assert not page.locator("#notice").is_visible()
    assert count_stored(page) == stored
    page.reload()
    page.locator(".message.assistant").nth(1).wait_for()
    assert page.locator("#messages").inner_text() == before
    page.context.close()


def test_stop_before_the_first_text_takes_a_new_question_back(
    server: LiveServer, browser: Any
) -> None:
    page = open_unwatched(server, browser)
    page.route("**/v1/chat/completions", lambda route: None)  # never answers
    with page.expect_request("**/v1/chat/completions"):
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    page.locator("#welcome").wait_for()
    assert page.locator(".message").count() == 0
    assert page.locator("#question").input_value() == QUESTION
    assert not page.locator("#notice").is_visible()
    assert not page.locator("#editing").is_visible()
    page.context.close()


# History.


def test_chats_outlive_a_reload(page: Any) -> None:
    ask(page, QUESTION)
    wait_for_end(page)
    # The last that is kept of an answer is which chat it belongs to.
    until(lambda: page.evaluate("sessionStorage.getItem('diffulex-chat') !== null"))
    page.reload()
    text = page.locator(".message.assistant .text")
    text.wait_for()
    assert text.inner_text().splitlines()[-1] == "7"
    assert page.locator(".message.user .text").inner_text() == QUESTION
    assert "tokens in" in page.locator(".message.assistant .foot").inner_text()
    assert not page.locator("#welcome").is_visible()
    # So does the recording.
    page.get_by_role("button", name="Inspect").click()
    page.get_by_role("button", name="Last step").click()
    shown = page.locator('#buffer .cell[data-state="committed"]').all_inner_texts()
    assert "".join(shown) == "3+4=7↵####·7"
    assert int(metric(page, "nfe")) > 0


def test_several_chats_are_listed_opened_and_deleted(page: Any) -> None:
    ask(page, QUESTION)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()
    ask(page, LONG_QUESTION)
    wait_for_stored(page, {"chats": 2, "recordings": 2})
    page.get_by_role("button", name="Chats").click()
    titles = page.locator(".chat-title")
    titles.nth(1).wait_for()
    assert titles.all_inner_texts() == [LONG_QUESTION[:80].strip(), QUESTION]
    titles.nth(1).click()
    assert page.locator(".message.user .text").all_inner_texts() == [QUESTION]

    page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name=f"Delete “{QUESTION}”").click()
    page.locator(".chat-title").nth(1).wait_for(state="detached")
    assert page.locator(".message").count() == 0
    page.get_by_role("button", name="Delete all").click()
    assert titles.count() == 1
    page.get_by_role("button", name="Really delete all chats?").click()
    page.locator("#chat-list", has_text="No chats yet.").wait_for()
    page.get_by_role("button", name="Close").click()
    page.reload()
    page.locator("#model", has_text=" · ").wait_for()
    assert page.locator(".message").count() == 0
    assert count_stored(page) == {"chats": 0, "recordings": 0}


def count_stored(page: Any) -> dict[str, int]:
    """Records of the page's database, by store."""
    counts: dict[str, int] = page.evaluate(
        """() => new Promise((resolve) => {
          const request = indexedDB.open("diffulex");
          request.onsuccess = async () => {
            const counts = {};
            for (const name of request.result.objectStoreNames) {
              const asked = request.result.transaction(name).objectStore(name).count();
              await new Promise((done) => { asked.onsuccess = done; });
              counts[name] = asked.result;
            }
            request.result.close();
            resolve(counts);
          };
        })"""
    )
    return counts


def wait_for_stored(page: Any, counts: dict[str, int]) -> None:
    """Waits until `count_stored` says so: an answer is shown shortly before it is stored."""
    deadline = time.monotonic() + 120
    while (stored := count_stored(page)) != counts:
        assert time.monotonic() < deadline, stored
        page.wait_for_timeout(20)


def test_replaced_answers_leave_no_recording(page: Any) -> None:
    ask(page, QUESTION)
    ask(page, LONG_QUESTION)
    wait_for_stored(page, {"chats": 1, "recordings": 2})
    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Enter")
    page.locator(".message.assistant").nth(1).wait_for(state="detached")
    page.get_by_role("button", name="Regenerate").wait_for()
    until(lambda: page.evaluate("document.querySelectorAll('.message').length === 2"))
    page.wait_for_timeout(300)
    wait_for_stored(page, {"chats": 1, "recordings": 1})


def open_chat(page: Any, question: str) -> None:
    """The stored chat that begins with the question."""
    page.get_by_role("button", name="Chats").click()
    page.locator(".chat-title", has_text=question[:40]).click()


def test_change_of_one_chat_is_not_asked_in_another(page: Any) -> None:
    ask(page, QUESTION)
    ask(page, QUESTION)
    page.get_by_role("button", name="New chat").click()
    ask(page, LONG_QUESTION)
    wait_for_stored(page, {"chats": 2, "recordings": 3})
    page.get_by_role("button", name="Edit").click()
    assert page.locator("#editing").is_visible()
    open_chat(page, QUESTION)
    assert not page.locator("#editing").is_visible()
    # What was typed stays, as a new question.
    assert page.locator("#question").input_value() == LONG_QUESTION
    page.locator("#question").press("Enter")
    page.locator(".message.assistant").nth(2).get_by_role("button", name="Regenerate").wait_for()
    questions = page.locator(".message.user .text")
    assert questions.all_inner_texts() == [QUESTION, QUESTION, LONG_QUESTION]
    wait_for_stored(page, {"chats": 2, "recordings": 4})
    open_chat(page, LONG_QUESTION)
    assert questions.all_inner_texts() == [LONG_QUESTION]


@pytest.mark.parametrize("way", ["New chat", "Delete", "Delete all"])
def test_change_ends_with_its_chat(page: Any, way: str) -> None:
    ask(page, QUESTION)
    wait_for_stored(page, {"chats": 1, "recordings": 1})
    page.get_by_role("button", name="Edit").click()
    assert page.locator("#editing").is_visible()
    if way == "New chat":
        page.get_by_role("button", name=way).click()
    else:
        page.get_by_role("button", name="Chats").click()
        name = f"Delete “{QUESTION}”" if way == "Delete" else "Delete all"
        page.get_by_role("button", name=name).click()
        if way == "Delete all":
            page.get_by_role("button", name="Really delete all chats?").click()
        page.locator("#chat-list", has_text="No chats yet.").wait_for()
        page.get_by_role("button", name="Close").click()
    assert page.locator(".message").count() == 0
    assert not page.locator("#editing").is_visible()


# What others wrote is text.


def test_question_and_title_are_text(page: Any) -> None:
    set_settings(page, max_tokens="4")
    ask(page, _ATTACK)
    assert page.locator(".message.user .text").inner_text() == _ATTACK
    wait_for_stored(page, {"chats": 1, "recordings": 1})
    page.get_by_role("button", name="Chats").click()
    assert page.locator(".chat-title").inner_text() == _ATTACK[:80]
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Code").click()
    assert "onerror" in page.locator("#snippets").inner_text()
    assert page.evaluate("window.attacked") is None


def test_answer_of_a_hostile_model_is_text(server: LiveServer, browser: Any) -> None:
    page = open_unwatched(server, browser)
    chunks = [{"choices": [{"delta": {"content": f"{_ATTACK} [x](javascript:window.attacked=1)"}}]}]
    frames = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=f"{frames}data: [DONE]\n\n", content_type="text/event-stream"
        ),
    )
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".message.assistant .text").inner_text() == f"{_ATTACK} x"
    assert page.locator(".message.assistant .text :is(img, script, a)").count() == 0
    assert page.evaluate("window.attacked") is None
    page.context.close()


@pytest.mark.slow
def test_stored_chats_are_not_trusted(page: Any) -> None:
    """Another page of the same origin may have written anything."""
    page.evaluate(
        """(attack) => new Promise((resolve) => {
          const request = indexedDB.open("diffulex");
          request.onsuccess = () => {
            const { result } = request;
            const store = result.transaction("chats", "readwrite").objectStore("chats");
            store.put({ id: "1", title: attack, updated: "x", exchanges: [
              { id: attack, question: attack, answer: attack, notes: [attack], hasRecording: true },
              null, 7, { question: { toString: null }, answer: 5, notes: "no" },
            ] });
            store.put({ id: "2", exchanges: "none" });
            store.transaction.oncomplete = () => { result.close(); resolve(); };
          };
        })""",
        _ATTACK,
    )
    page.get_by_role("button", name="Chats").click()
    page.locator(".chat-title", has_text="onerror").click()
    page.locator(".message.user .text").first.wait_for()
    assert page.locator(".message.user .text").first.inner_text() == _ATTACK
    assert page.locator("#messages :is(img, script)").count() == 0
    page.get_by_role("button", name="Inspect").first.click()
    page.locator("#notice", has_text="expected diffulex-recording").wait_for()
    assert page.evaluate("window.attacked") is None
