#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An answer with a fixed form, as a program reads it: the form is given, the model fills the gaps.

    python examples/python/structured.py ["QUESTION" ...]

docs/infilling.md has the rules; an engine that writes from left to right needs a grammar for this.
"""

from __future__ import annotations

import json
import re
import sys

from diffulex import Diffulex
from diffulex.engine.template import template_token_ids

QUESTIONS = (
    "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?",
    "Ann has 9 cards. She loses 4 cards. How many cards does Ann have now?",
)
FORM = "<mask>-<mask>=<mask>\n#### <mask>"
FIELDS = re.compile(r"(?P<had>\d+)-(?P<lost>\d+)=(?P<left>\d+)\n#### (?P<answer>\d+)")


def main(questions: list[str]) -> None:
    with Diffulex("demo") as engine:
        template = template_token_ids(FORM, engine.tokenizer)
        outputs = engine.generate(
            questions, use_chat_template=True, template_token_ids=template, summary=False
        )
    for output in outputs:
        fields = FIELDS.fullmatch(output.text)
        if fields is None:  # the form is kept; what stands in the gaps is the model's
            raise SystemExit(f"expected numbers in the gaps, got {output.text!r}")
        print(json.dumps({name: int(text) for name, text in fields.groupdict().items()}))


if __name__ == "__main__":
    main(sys.argv[1:] or list(QUESTIONS))
