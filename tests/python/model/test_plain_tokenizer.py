# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that is read without transformers does what transformers does, or leaves it to it."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import time
from pathlib import Path

import pytest

from diffulex.checkpoint.plain_tokenizer import PlainTokenizer, read_plain_tokenizer
from diffulex.checkpoint.resolve import demo_dir
from diffulex.checkpoint.template_bound import bounded_rendering
from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex.errors import PromptError
from fixtures.checkpoints import write_tokenizer

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = [demo_dir(), *sorted(path.parent for path in ROOT.glob("examples/zoo/*/tokenizer.json"))]
CONVERSATIONS = [
    [{"role": "user", "content": "Ben has 8 coins."}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": " b\n<|im_end|> {{ 1 }}"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 2,
]


@pytest.fixture(scope="module", params=BUNDLED, ids=lambda path: path.name)
def pair(request) -> tuple[PlainTokenizer, object]:
    """A bundled tokenizer in both forms."""
    from transformers import PreTrainedTokenizerFast

    full = PreTrainedTokenizerFast.from_pretrained(str(request.param))
    plain = read_plain_tokenizer(request.param, lambda: pytest.fail("transformers was asked"))
    assert plain is not None
    return plain, full


def test_facts_are_the_same(pair):
    plain, full = pair
    for name in ("bos_token", "eos_token", "mask_token", "bos_token_id", "eos_token_id"):
        assert getattr(plain, name) == getattr(full, name), name
    assert plain.mask_token_id == full.mask_token_id
    assert plain.get_vocab() == full.get_vocab()
    assert plain.get_added_vocab() == full.get_added_vocab()
    assert plain.chat_template == full.chat_template
    shown = {index: str(token) for index, token in full.added_tokens_decoder.items()}
    assert {index: str(token) for index, token in plain.added_tokens_decoder.items()} == shown
    ids = [0, 1, 636, 639]
    assert plain.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)


def test_texts_are_the_same(pair):
    plain, full = pair
    draw = random.Random(7)
    letters = "ab 12\n\t.?é漢🙂<|im_end|>MASK"
    texts = ["", "Ben has 8 coins.", "<|im_start|>user\n", "<|MASK|>", "a  b"]
    texts += ["".join(draw.choices(letters, k=draw.randrange(40))) for _ in range(200)]
    for text in texts:
        for special in (True, False):
            ids = plain.encode(text, add_special_tokens=special)
            assert ids == full.encode(text, add_special_tokens=special)
            for skip in (True, False):
                options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
                assert plain.decode(ids, **options) == full.decode(ids, **options)
    for _ in range(200):
        ids = draw.choices(range(640), k=draw.randrange(30))
        assert plain.decode(ids, skip_special_tokens=True) == full.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_are_the_same(pair, messages, add_generation_prompt):
    plain, full = pair
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    expected = full.apply_chat_template(messages, **options)
    assert plain.apply_chat_template(messages, **options) == expected


def test_rejections_are_the_same(pair):
    plain, full = pair
    for messages in ([{"role": "tool", "content": "x"}], [{"role": "system", "content": "x"}]):
        with pytest.raises(Exception, match="expected") as theirs:
            full.apply_chat_template(messages, tokenize=False)
        with pytest.raises(type(theirs.value), match=str(theirs.value)):
            plain.apply_chat_template(messages, tokenize=False)


class _Full:
    """Stands for the tokenizer of transformers."""

    name_of_its_own = 7

    def apply_chat_template(self, messages, **options):
        return "full", messages, options


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ strftime_now('%Y') }}",
        "{{ tools }}",
        "{{ bos_token }}",
        "{% generation %}x{% endgeneration %}",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace(a=1) %}{% set n._b = 2 %}",
        "{% set n = namespace({'_a': 1}) %}",
        "{% set n = namespace(**{'_a': 1}) %}",
        "{{ dict(a=1) }}",
        "{{ range(3) }}",
        "{{ lipsum() }}",
        "{% if %}",
    ],
)
def test_templates_that_are_left_to_transformers(template):
    plain = read_plain_tokenizer(demo_dir(), _Full)
    plain.chat_template = template
    messages = [{"role": "user", "content": "x"}]
    assert plain.apply_chat_template(messages, tokenize=False)[0] == "full"
    assert plain.name_of_its_own == 7


@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        ([{"role": "user", "content": "x", "reasoning": "y"}], {}),
        ([{"role": "user", "content": ["x"]}], {}),
        ([{"role": "user", "content": "x"}], {"enable_thinking": False}),
        ([], {}),
    ],
)
def test_calls_that_are_left_to_transformers(messages, variables):
    plain = read_plain_tokenizer(demo_dir(), _Full)
    assert plain.apply_chat_template(messages, tokenize=False, **variables)[0] == "full"


def test_rendering_is_bounded():
    plain = read_plain_tokenizer(demo_dir(), _Full)
    for template in (
        "{% for a in messages * 99999 %}{% for b in messages * 99999 %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ messages[0].content * 999999999 }}",
    ):
        plain.chat_template = template
        with pytest.raises(PromptError, match="cannot be rendered"), bounded_rendering():
            plain.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"tokenizer_class": "LlamaTokenizer"},
        {"clean_up_tokenization_spaces": True},
        {"extra_special_tokens": {"a": "<|im_end|>"}},
        {"bos_token": "not in the file"},
        {"eos_token": {"content": "<|endoftext|>"}},
        {"added_tokens_decoder": {}},
    ],
)
def test_files_that_are_left_to_transformers(tmp_path, change):
    shutil.copytree(demo_dir(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "m" / "tokenizer_config.json"
    assert read_plain_tokenizer(path.parent, _Full) is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_plain_tokenizer(path.parent, _Full) is None


@pytest.mark.parametrize("tokens", [[{"id": 3}], [3], 7, [{"content": "x", "special": True}]])
def test_malformed_files_are_left_to_transformers(tmp_path, tokens):
    shutil.copytree(demo_dir(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "m" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens": tokens}))
    assert read_plain_tokenizer(path.parent, _Full) is None


def test_copies_are_the_same():
    plain = read_plain_tokenizer(demo_dir(), _Full)
    other = pickle.loads(pickle.dumps(plain))
    assert other.encode("Ben has 8") == plain.encode("Ben has 8")
    assert other.name_of_its_own == 7


def test_further_files_are_left_to_transformers(tmp_path):
    shutil.copytree(demo_dir(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / "special_tokens_map.json").write_text("{}")
    assert read_plain_tokenizer(tmp_path / "m", _Full) is None
    write_tokenizer(tmp_path, "slow")
    assert read_plain_tokenizer(tmp_path, _Full) is None
    assert not isinstance(Tokenizer.from_dir(tmp_path).backend, PlainTokenizer)


@pytest.mark.parametrize("template", ["{{ 7 ** 30000000 }}", "{{ ('%3000000000d' % 1)|length }}"])
def test_constants_are_bounded_before_they_are_computed(template):
    """Looking for the names of a template must not compute them: this would take a minute."""
    tokenizer = Tokenizer.from_dir(demo_dir())
    tokenizer.use_chat_template(template)
    start = time.process_time()
    with pytest.raises(PromptError, match="it has a value or length above"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])
    assert time.process_time() - start < 10


def test_it_is_called_and_measured_like_the_full_one(pair):
    plain, full = pair
    copy = PlainTokenizer(plain.backend_tokenizer, {}, None, lambda: full)
    assert copy("Ben has 8 coins.").input_ids == full("Ben has 8 coins.").input_ids
    assert len(copy) == len(full)
