# SPDX-License-Identifier: Apache-2.0
"""Answers for data sets of Ray Data: every row, whatever happens to an actor."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("ray", "ray", "pyarrow")

from diffulex import Diffulex  # noqa: E402
from diffulex.errors import ConfigError  # noqa: E402
from diffulex.ray.data import Generator  # noqa: E402
from ray_cluster.conftest import kill  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_reqs": 8}
SAMPLING = {"max_tokens": 8, "temperature": 0}


def prompt(index: int) -> str:
    return f"Tom has {index % 9 + 1} apples. He buys 4 more apples. How many apples has he now?"


class Mortal(Generator):
    """Its first actor loses a rank of its engine in its third batch, or ends if there is but one."""

    def __init__(self, marker: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._marker = marker
        self._num_batches = 0

    async def __call__(self, batch: Any) -> Any:
        self._num_batches += 1
        if self._num_batches == 3:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
                await self._open()
                executor: Any = self._engine._worker.engine._executor
                if not hasattr(executor, "_followers"):
                    os._exit(1)
                kill(executor._followers._group._pipes.children[0].pid)
            except FileExistsError:
                pass
        return await super().__call__(batch)


@pytest.mark.parametrize(("ranks", "count"), [(1, 200), (2, 80)])
def test_every_row_is_answered_although_an_actor_dies(
    cluster: Any, tmp_path: Any, ranks: int, count: int
) -> None:
    """Batches of one actor are decoded together; a row that cannot be served does not stop others."""
    import ray

    node = cluster.add_node(num_cpus=4)
    rows = [{"id": i, "prompt": prompt(i) if i % 50 else ""} for i in range(count)]
    dataset = ray.data.from_items(rows).map_batches(
        Mortal,
        fn_constructor_args=(str(tmp_path / "died"), "demo", SAMPLING),
        fn_constructor_kwargs={**SETTINGS, "tensor_parallel_size": ranks},
        batch_size=20,
        compute=ray.data.ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=4),
        max_concurrency=4,
        num_cpus=1,
    )
    found = {row["id"]: row for row in dataset.take_all()}
    assert (tmp_path / "died").exists()
    assert sorted(found) == list(range(count))
    with Diffulex("demo", tensor_parallel_size=ranks, **SETTINGS) as engine:
        outputs = engine.generate([prompt(i) for i in range(9)], **SAMPLING, summary=False)
    for index, row in found.items():
        if index % 50 == 0:
            assert row["text"] == ""
            assert row["finish_reason"] == "error"
            assert "prompt" in row["error"]
        else:
            output = outputs[index % 9]
            assert (row["text"], row["error"]) == (output.text, "")
            assert tuple(row["token_ids"]) == output.token_ids
            assert row["finish_reason"] == output.finish_reason
            assert row["nfe"] > 0
    cluster.remove_node(node)


def test_rows_of_all_kinds_without_a_cluster() -> None:
    """Conversations, as maps and as JSON, token ids, parameters of a row, and what is none of these."""

    async def run() -> None:
        generator = Generator("demo", SAMPLING, **SETTINGS)
        chat = [{"role": "user", "content": prompt(1)}]
        column = np.empty(4, object)
        column[:] = [chat, f'[{{"role": "user", "content": "{prompt(1)}"}}]', "no JSON", 7]
        more = [{"max_tokens": 3}, {"max_tokens": 3, "top_k": None}, None, None]
        answers = await generator({"messages": column, "sampling_params": more, "id": [1, 2, 3, 4]})
        assert answers["id"] == [1, 2, 3, 4]
        texts, errors = answers["text"], answers["error"]
        assert texts[0] == texts[1] != ""
        assert len(answers["token_ids"][0]) <= 3
        assert errors[2].startswith("messages: expected a list as JSON, got 'no JSON'")
        assert errors[3].startswith("messages: expected a list of maps, got 7")
        ids = np.empty(1, object)
        ids[:] = [np.arange(20, 40)]
        answers = await generator({"prompt": ids, "sampling_params": [{"max_tokenz": 3}]})
        assert "max_tokenz" in answers["error"][0]
        batches = [generator({"prompt": [prompt(i)]}) for i in range(3)]
        assert all(answer["text"][0] for answer in await asyncio.gather(*batches))
        with pytest.raises(ConfigError, match="expected a column prompt or messages, got text"):
            await generator({"text": ["a"]})
        await generator.close()

    asyncio.run(run())
    with pytest.raises(ConfigError, match="sampling_params: expected fields of SamplingParams"):
        Generator("demo", {"max_tokenz": 3})
