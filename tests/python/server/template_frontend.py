# SPDX-License-Identifier: Apache-2.0
"""A frontend whose tokenizer renders chats so that every option can be seen."""

from __future__ import annotations

from byte_tokenizer import MASK, VOCAB_SIZE, ByteTokenizer
from diffulex.errors import PromptError
from fake_frontend import FakeFrontend

LIMIT = 100


class TemplateTokenizer(ByteTokenizer):
    """Renders a chat so that every option can be seen."""

    has_chat_template = True

    def render_chat(self, messages, *, add_generation_prompt=True, **variables):
        if messages[0]["role"] == "other":
            raise PromptError("chat template: it rejected the messages: no such role")
        text = ";".join(f"{message['role']}={message['content']}" for message in messages)
        text += "".join(f"|{name}={value}" for name, value in sorted(variables.items()))
        return text + ("|>" if add_generation_prompt else "")

    def decode(self, token_ids, skip_special_tokens=False):
        return super().decode(token_ids, skip_special_tokens)


def make_frontend():
    frontend = FakeFrontend()
    frontend.tokenizer = TemplateTokenizer()
    frontend.info = {
        "max_model_len": LIMIT,
        "vocab_size": VOCAB_SIZE,
        "mask_token_id": MASK,
        "block_size": 8,
        "buffer_size": 2,
        "page_size": 8,
        "num_pages": 100,
        "max_num_batched_tokens": 200,
    }
    return frontend
