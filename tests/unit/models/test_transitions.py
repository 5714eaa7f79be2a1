"""A transition head: what it adds, how candidates are normalised, and that files keep it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ddtree
from ddtree.errors import CheckpointError
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_export import save_drafter
from ddtree.models.loading import load_drafter
from ddtree.models.target import Target
from ddtree.models.transitions import NO_ROW, TransitionHead, conditioned
from ddtree.sampling.coupling import ChangesBehind
from ddtree.train.network import new_network
from ddtree.types import Marginals
from tests.support.drafters import feed
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("unchecked")

THIRD = tuple(range(0, VOCAB_SIZE, 3))
RANK = 5


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def drafter_of(target: Target, ids: tuple[int, ...] | None, top_k: int = 16) -> DFlashDrafter:
    """A random drafter whose transitions weigh as much as its logits."""
    config = replace(
        dflash_drafter(target).config,
        selector_rank=RANK,
        selector_top_k=top_k,
        draft_vocab_size=None if ids is None else len(ids),
    )
    network = new_network(config, seed=3)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    known = None if ids is None else torch.tensor(ids)
    return DFlashDrafter(network.eval(), target, name="random", draft_token_ids=known)


def head_of(num_tokens: int, hidden_size: int) -> TransitionHead:
    torch.manual_seed(2)
    head = TransitionHead(num_tokens, RANK, hidden_size)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


@torch.no_grad()
def test_what_is_added_is_the_formula_of_the_format() -> None:
    head = head_of(7, 4)
    hidden, previous = torch.randn(3, 4), torch.tensor([2, 6, NO_ROW])
    added = head.changes(previous, hidden)
    for place, row in enumerate(previous.tolist()):
        for token in range(7):
            query = head.predecessor_codebook[row] * (head.hidden_projection.weight @ hidden[place])
            expected = 0.0 if row == NO_ROW else query @ head.successor_codebook[token]
            assert float(added[place, token]) == pytest.approx(float(expected), abs=1e-5)


def test_between_candidates_is_the_same_as_behind_every_token() -> None:
    head = head_of(9, 4)
    hidden = torch.randn(3, 4)
    previous, following = torch.randint(9, (3, 2)), torch.randint(9, (3, 4))
    found = head.between(previous, following, hidden)
    for depth in range(3):
        behind = head.changes(previous[depth], hidden[depth].expand(2, -1))
        assert torch.allclose(found[depth], behind[:, following[depth]], atol=1e-6)


def test_where_nothing_is_added_every_row_is_the_marginal() -> None:
    said = torch.tensor([[0.5, 0.3, 0.1], [0.4, 0.2, 0.1]]).log()
    alone = Marginals(said, torch.tensor([[4, 5, 6], [1, 2, 3]]))
    # The scores may lack a constant of their depth.
    found = conditioned(alone, said + torch.tensor([[3.0], [-2.0]]), torch.zeros(2, 3, 3))
    assert torch.allclose(found.log_probs, said, atol=1e-6)
    assert found.token_ids.equal(alone.token_ids)
    assert found.transitions is not None
    assert torch.allclose(found.transitions.log_probs, said[1:, None].expand(1, 3, 3), atol=1e-6)
    assert found.transitions.ranks.tolist() == [[[0, 1, 2]] * 3]


def test_a_depth_whose_candidates_are_all_banned_stays_banned() -> None:
    said = torch.tensor([[0.0, -1.0], [-torch.inf, -torch.inf]])
    found = conditioned(Marginals(said, torch.zeros(2, 2).long()), said, torch.zeros(2, 2, 2))
    assert found.transitions is not None
    assert (found.transitions.log_probs == -torch.inf).all()


def test_a_banned_candidate_stays_banned_beside_others() -> None:
    said = torch.tensor([[0.0, -torch.inf], [-0.5, -torch.inf]])
    found = conditioned(Marginals(said, torch.tensor([[1, 2], [3, 4]])), said, torch.ones(2, 2, 2))
    assert found.transitions is not None
    assert found.transitions.log_probs[0, 0, 1] == found.log_probs[0, 1] == -torch.inf
    assert ddtree.build_tree(found, 0, 9).token_ids.tolist() == [0, 1, 3]


def test_depth_one_is_put_in_order_behind_the_root_and_depth_two_follows() -> None:
    said = torch.tensor([[0.6, 0.4], [0.5, 0.5]]).log()
    added = torch.zeros(2, 2, 2)
    added[0, :, 1] = 5.0  # behind the root the second candidate is the likelier one
    added[1, 1] = torch.tensor([0.0, 7.0])  # and behind that one comes the second again
    found = conditioned(Marginals(said, torch.tensor([[8, 9], [3, 4]])), said, added)
    assert found.token_ids.tolist() == [[9, 8], [3, 4]]
    assert found.transitions is not None
    assert found.transitions.ranks[0, 0].tolist() == [1, 0]
    tree = ddtree.build_tree(found, 1, 2)
    assert tree.token_ids.tolist() == [1, 9, 4]


@pytest.mark.parametrize("ids", [None, THIRD], ids=["whole", "reduced"])
@pytest.mark.parametrize("root_id", [3, 4])  # the second has no row in the reduced vocabulary
def test_a_draft_is_what_training_scores(
    ids: tuple[int, ...] | None, root_id: int, target: Target
) -> None:
    drafter = drafter_of(target, ids, top_k=VOCAB_SIZE)
    session = drafter.start(8)
    features = torch.randn(5, len(drafter.layer_ids) * target.hidden_size)
    feed(session, features)
    hidden = []
    handle = drafter.network.norm.register_forward_hook(lambda *args: hidden.append(args[2]))
    with torch.inference_mode():
        found = session.propose(root_id, num_depths=3, num_ranks=VOCAB_SIZE)
        handle.remove()
        slots = hidden[0].reshape(-1, target.hidden_size)[1:4]
        logits, head = drafter.logits(slots), drafter.network.candidate_selector
        assert head is not None
        known = list(range(VOCAB_SIZE) if ids is None else ids)
        root_row = known.index(root_id) if root_id in known else NO_ROW
        first = (logits[0] + head.changes(torch.tensor(root_row), slots[0])).log_softmax(-1)
        assert torch.allclose(found.log_probs[0].exp().sum(), torch.tensor(1.0), atol=1e-5)
        for token, log_prob in zip(found.token_ids[0], found.log_probs[0], strict=True):
            assert float(log_prob) == pytest.approx(float(first[known.index(token)]), abs=1e-4)
        assert found.transitions is not None
        for depth in (1, 2):
            for place, parent in enumerate(found.token_ids[depth - 1].tolist()):
                row = torch.tensor(known.index(parent))
                behind = (logits[depth] + head.changes(row, slots[depth])).log_softmax(-1)
                ranks = found.transitions.ranks[depth - 1, place]
                tokens = found.token_ids[depth][ranks].tolist()
                expected = behind[[known.index(token) for token in tokens]]
                got = found.transitions.log_probs[depth - 1, place]
                assert torch.allclose(got, expected, atol=1e-4)


class Doubled:
    """A `Perturb` that doubles the logits, and keeps what it is told."""

    changes_behind: ChangesBehind

    def __call__(self, logits: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        return 2 * logits

    def weigh(self, changes: torch.Tensor) -> torch.Tensor:
        return 2 * changes

    def keep(self, changes_behind: ChangesBehind) -> None:
        self.changes_behind = changes_behind


@pytest.mark.parametrize("ids", [None, THIRD], ids=["whole", "reduced"])
def test_a_perturbed_draft_says_how_its_logits_depend_on_the_tokens_before(
    ids: tuple[int, ...] | None, target: Target
) -> None:
    drafter, perturb = drafter_of(target, ids, top_k=VOCAB_SIZE), Doubled()
    session = drafter.start(8)
    feed(session, torch.randn(5, len(drafter.layer_ids) * target.hidden_size))
    hidden = []
    handle = drafter.network.norm.register_forward_hook(lambda *args: hidden.append(args[2]))
    with torch.inference_mode():
        found = session.propose(3, num_depths=3, num_ranks=VOCAB_SIZE, perturb=perturb)
        handle.remove()
        path = found.token_ids[:2, 4].tolist()
        changes = perturb.changes_behind(path)
        logits = drafter.logits(hidden[0].reshape(-1, target.hidden_size)[1:4])
        expected = (2 * (logits + changes)).log_softmax(-1)
        known = list(range(VOCAB_SIZE) if ids is None else ids)
        behind = torch.stack([found.transitions.log_probs[d, 4] for d in range(2)])
        ranks = torch.stack([found.transitions.ranks[d, 4] for d in range(2)])
        for depth, tokens in enumerate(found.token_ids[1:].gather(1, ranks).tolist()):
            columns = [known.index(token) for token in tokens]
            assert torch.allclose(behind[depth], expected[depth + 1, columns], atol=1e-4)
        first = [known.index(token) for token in found.token_ids[0].tolist()]
        assert torch.allclose(found.log_probs[0], expected[0, first], atol=1e-4)
        # The root is always there; a token that cannot be drafted conditions nothing.
        assert torch.allclose(perturb.changes_behind([])[0], changes[0], atol=1e-6)
        if ids is not None:
            assert not perturb.changes_behind([1])[1].any()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("ids", [None, THIRD], ids=["whole", "reduced"])
def test_the_text_is_the_same_with_transitions(
    ids: tuple[int, ...] | None, temperature: float, target: Target
) -> None:
    pair = ddtree.Pair(target, drafter_of(target, ids))
    texts = {
        (method, budget): pair.generate(
            [5, 6, 7],
            budget=budget,
            max_new_tokens=24,
            method=method,
            temperature=temperature,
            seed=2,
        ).token_ids
        for method, budget in (("ar", 0), ("dflash", 8), ("ddtree", 3), ("ddtree", 24))
    }
    assert len(set(texts.values())) == 1


def test_a_folder_keeps_the_head_apart_and_loads_it_again(tmp_path: Path, target: Target) -> None:
    drafter = drafter_of(target, THIRD, top_k=9)
    folder = tmp_path / "drafter"
    for _ in range(2):  # the second time it replaces an older one
        save_drafter(
            drafter.network,
            drafter.config,
            folder,
            draft_token_ids=THIRD,
            provenance={},
            dtype=torch.float32,
        )
    plain = load_file(folder / "model.safetensors")
    assert not any("selector" in name for name in plain)
    declared = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert (declared["transition_rank"], declared["transition_top_k"]) == (RANK, 9)
    assert not any(key.startswith("selector") for key in declared)
    loaded = load_drafter(folder, target, packed=False)
    assert loaded.config == drafter.config
    expected = drafter.network.state_dict()
    assert all(expected[name].equal(t) for name, t in loaded.network.state_dict().items())


def test_a_folder_that_lost_its_head_is_refused_by_name(tmp_path: Path, target: Target) -> None:
    drafter, folder = drafter_of(target, None), tmp_path / "drafter"
    save_drafter(drafter.network, drafter.config, folder, draft_token_ids=None, provenance={})
    (folder / "transitions" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: candidate_selector\.predecessor_codebook"):
        load_drafter(folder, target)
