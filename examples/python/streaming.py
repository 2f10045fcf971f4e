#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints answers while they are written: one that is final as it comes, then several at once.

python examples/python/streaming.py ["QUESTION" ...]
"""

from __future__ import annotations

import asyncio
import sys

from diffulex import AsyncLLM

QUESTIONS = (
    "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?",
    "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?",
)


async def follow(llm: AsyncLLM, number: int, question: str) -> None:
    """One line per piece of text that can no longer change."""
    async for event in llm.stream(question, use_chat_template=True):
        if event.text:
            print(f"{number}: {event.text!r}", flush=True)
        if event.output is not None:
            print(f"{number}: done after {event.output.metrics.nfe} forwards", flush=True)


async def main(questions: list[str]) -> None:
    async with AsyncLLM("demo", max_num_reqs=8) as llm:
        async for event in llm.stream(questions[0], use_chat_template=True):
            print(event.text, end="", flush=True)
        print()
        # Open together, decoded together.
        await asyncio.gather(*(follow(llm, *item) for item in enumerate(questions)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(QUESTIONS)))
