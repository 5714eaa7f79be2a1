"""The other tests would see these faults: each worker here has one, and is caught."""

from __future__ import annotations

import pytest

from tests.serving.conftest import Engines, Texts
from tests.serving.own_drafts import OwnDrafts
from tests.serving.test_engine_equality import ROUNDING, tree_job


@pytest.mark.parametrize("worker", ["MasklessWorker", "UnmovedWorker"])
def test_without_the_mask_or_the_move_texts_are_wrong(
    worker: str, engines: Engines, texts: Texts
) -> None:
    job = tree_job(engines, texts, {"all": texts.requests()}, worker=worker)
    answer = engines.run(worker, job)
    wrong = {texts.scripts[i] for i in texts.wrong(answer["batches"]["all"])}
    assert {"interleaved", "high_rank"} <= wrong
    # Where nothing is accepted there is nothing to move.
    if worker == "UnmovedWorker":
        assert "hostile" not in wrong


def test_without_the_order_of_rows_texts_are_right_and_drafts_are_not(
    engines: Engines, texts: Texts, own_drafts: OwnDrafts
) -> None:
    job = tree_job(engines, texts, {"all": texts.requests()}, worker="UnorderedWorker")
    answer = engines.run("UnorderedWorker", job)
    assert texts.wrong(answer["batches"]["all"]) == []
    off = own_drafts.off(answer["rpc"]["drafts_seen"][0])
    assert max(off) > 100 * ROUNDING
    assert sum(each > ROUNDING for each in off) > len(off) / 4
