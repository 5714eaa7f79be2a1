"""The DFlash network against a plain re-implementation, written from CHECKPOINTS A alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree.models.drafter import DFlashDrafter, DFlashSession, top_marginals
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.sampling.coupling import ChangesBehind
from ddtree.types import Marginals
from tests.support.checkpoints import Tensors, drafter_tensors
from tests.support.drafters import feed
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE, drafter_config, tiny_model, tiny_target

FULL, SLIDING = "full_attention", "sliding_attention"
NUM_CONTEXT = 11
ROOT = 17
# A window shorter than the block and than the context, so that both of its sides matter.
WINDOW = {"sliding_window": 4}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

VARIANTS: dict[str, dict[str, object]] = {
    "full": {},
    "sliding, by default causal": {"layer_types": [SLIDING, SLIDING], **WINDOW},
    "sliding, not causal": {"layer_types": [SLIDING] * 2, **WINDOW, "is_causal": False},
    "mixed": {"layer_types": [SLIDING, FULL], **WINDOW},
    "causal": {"is_causal": True},
    "causal and mixed": {"layer_types": [FULL, SLIDING], **WINDOW, "is_causal": True},
    "output multiplier": {"output_multiplier": 0.19611613513818404},
    "soft cap": {"final_logit_softcapping": 1.5},
    "multiplier, then soft cap": {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "embedding scale": {"input_embedding_scale": 3.0},
    "own theta": {"rope_theta": 37.0},
    "theta inside": {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}},
    "yarn": {"rope_scaling": YARN},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 12},
    "one layer, three taps": {
        "num_hidden_layers": 1,
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [3, 0, 1]},
    },
    "biases": {"attention_bias": True},
    "epsilon": {"rms_norm_eps": 0.5},
    "block of two": {"block_size": 2},
}


@dataclass(frozen=True)
class Naive:
    """One DFlash pass without cache, batch or library: loops over slots, heads and keys.

    `shift` moves every position by so much between context and block: a control that must fail.
    """

    raw: dict[str, object]
    weights: Tensors
    embedding: Tensor
    head: Tensor
    shift: int = 0

    def get(self, key: str, default: object = None) -> object:
        value = self.raw["dflash_config"].get(key)
        value = self.raw.get(key) if value is None else value
        return default if value is None else value

    def log_probs(self, features: Tensor, root_id: int) -> Tensor:
        """[L, V] for the block behind these context features [T, F]."""
        return self.logits(self.hidden(features, root_id)).log_softmax(dim=-1)

    def hidden(self, features: Tensor, root_id: int) -> Tensor:
        """[L, D], final-normed, of the drafted slots."""
        start, size = features.shape[0], self.get("block_size")
        context = [self.norm("hidden_norm", self.weights["fc.weight"] @ f) for f in features]
        ids = [root_id] + [self.get("mask_token_id")] * (size - 1)
        h = [self.embedding[i] * self.get("input_embedding_scale", 1.0) for i in ids]
        for layer in range(self.get("num_hidden_layers")):
            h = self.layer(layer, h, context, start)
        return torch.stack([self.norm("norm", x) for x in h[1:]])

    def logits(self, hidden: Tensor) -> Tensor:
        """[L, V], scaled and capped."""
        logits = torch.stack([self.head @ x for x in hidden]) * self.get("output_multiplier", 1.0)
        if cap := self.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        return logits

    def layer(self, layer: int, h: list[Tensor], context: list[Tensor], start: int) -> list[Tensor]:
        name = f"layers.{layer}."
        x = [self.norm(name + "input_layernorm", row) for row in h]
        y = self.attended(layer, self.mixed(name + "attention_conv", 0, x, x), context, start)
        h = added(h, self.mixed(name + "attention_conv", 1, x, y))
        x = [self.norm(name + "post_attention_layernorm", row) for row in h]
        y = [self.fed_forward(name, row) for row in self.mixed(name + "mlp_conv", 0, x, x)]
        return added(h, self.mixed(name + "mlp_conv", 1, x, y))

    def mixed(self, name: str, side: int, x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        """DFlash2: y of every slot and of those before it, by weights that x changes."""
        base = self.weights.get(name + ".base_kernel")
        if base is None:
            return y
        taps, width, group = *base.shape[1:], self.get("conv_group_size")
        projection, kernel = self.weights[name + ".kernel_projection.weight"], base.tolist()
        rows = [row.tolist() for row in y]
        out = [[0.0] * width for _ in y]
        for slot in range(len(y)):
            # [side, tap, group], flat.
            dynamic = (projection @ x[slot]).tolist()
            for tap in range(min(taps, slot + 1)):
                for c in range(width):
                    at = (side * taps + tap) * (width // group) + c // group
                    weight = kernel[side][tap][c] + dynamic[at]
                    out[slot][c] += weight * rows[slot - tap][c]
        return list(torch.tensor(out, dtype=base.dtype))

    def attended(
        self, layer: int, x: list[Tensor], context: list[Tensor], start: int
    ) -> list[Tensor]:
        name = f"layers.{layer}."
        # Context rows go in as they are; the block's are normed first.
        rows = context + x
        head_dim, num_heads = self.get("head_dim"), self.get("num_attention_heads")
        group = num_heads // self.get("num_key_value_heads")
        keys = [self.heads(name + "self_attn.k_proj", row) for row in rows]
        values = [self.heads(name + "self_attn.v_proj", row) for row in rows]
        out = []
        for slot, row in enumerate(x):
            queries = self.heads(name + "self_attn.q_proj", row)
            attended = []
            for i in range(num_heads):
                query = self.rotated(self.norm(name + "self_attn.q_norm", queries[i]), start + slot)
                seen, scores = [], []
                for position in range(len(rows)):
                    if not self.sees(layer, start + slot, position):
                        continue
                    key = self.norm(name + "self_attn.k_norm", keys[position][i // group])
                    late = self.shift if position < start else 0
                    scores.append(query @ self.rotated(key, position + late) / math.sqrt(head_dim))
                    seen.append(values[position][i // group])
                weights = torch.stack(scores).softmax(dim=0)
                attended.append(sum(w * v for w, v in zip(weights, seen, strict=True)))
            out.append(self.linear(name + "self_attn.o_proj", torch.cat(attended)))
        return out

    def fed_forward(self, name: str, x: Tensor) -> Tensor:
        gate = self.linear(name + "mlp.gate_proj", x)
        wide = gate * gate.sigmoid() * self.linear(name + "mlp.up_proj", x)
        return self.linear(name + "mlp.down_proj", wide)

    def sees(self, layer: int, q: int, k: int) -> bool:
        sliding = self.get("layer_types", [FULL] * (layer + 1))[layer] == SLIDING
        causal = self.get("is_causal", sliding)
        window = self.get("sliding_window") if sliding else math.inf
        return q - k < window and (k <= q if causal else k - q < window)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt((x * x).mean() + self.get("rms_norm_eps"))
        return x * scale * self.weights[name + ".weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights[name + ".weight"] @ x + self.weights.get(name + ".bias", 0.0)

    def heads(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(name, x).split(self.get("head_dim"))

    def rotated(self, x: Tensor, position: int) -> Tensor:
        frequencies, factor = self.frequencies
        half = x.shape[0] // 2
        out = torch.empty_like(x)
        for i in range(half):
            cos = math.cos(position * frequencies[i]) * factor
            sin = math.sin(position * frequencies[i]) * factor
            out[i] = x[i] * cos - x[half + i] * sin
            out[half + i] = x[half + i] * cos + x[i] * sin
        return out

    @functools.cached_property
    def frequencies(self) -> tuple[list[float], float]:
        parameters = {"rope_theta": self.get("rope_theta"), **(self.get("rope_scaling") or {})}
        parameters.update(self.get("rope_parameters") or {})
        kind, head_dim = parameters.get("rope_type", "default"), self.get("head_dim")
        if kind == "default":
            theta = parameters["rope_theta"]
            return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], 1.0
        config = Qwen3Config(
            head_dim=head_dim,
            rope_parameters=parameters,
            max_position_embeddings=self.get("max_position_embeddings"),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        return frequencies.tolist(), factor


def added(h: list[Tensor], y: list[Tensor]) -> list[Tensor]:
    return [row + new for row, new in zip(h, y, strict=True)]


def pair_of(target: Target | None = None, **changes: object) -> tuple[DFlashDrafter, Naive]:
    """The drafter and its naive twin over the same random weights."""
    target = target or tiny_target("qwen3")
    raw = {k: v for k, v in drafter_config(**changes).items() if v is not None}
    weights = drafter_tensors(raw)
    network = DFlashNetwork(parse_drafter_config(raw, "test"))
    network.load_state_dict(weights)
    naive = Naive(
        raw,
        {name: tensor.double() for name, tensor in weights.items()},
        target.model.get_input_embeddings().weight.detach().double(),
        target.model.get_output_embeddings().weight.detach().double(),
    )
    return DFlashDrafter(network, target, name="test"), naive


def random_features(drafter: DFlashDrafter, num_positions: int = NUM_CONTEXT) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    width = len(drafter.layer_ids) * HIDDEN_SIZE
    return torch.randn(num_positions, width, generator=generator)


@torch.inference_mode()
def fed(drafter: DFlashDrafter, features: Tensor, *chunks: int) -> DFlashSession:
    session = drafter.start(3)
    for chunk in features.split(list(chunks) or [features.shape[0]]):
        feed(session, chunk)
    return session


@torch.inference_mode()
def proposed(session: DFlashSession, root_id: int = ROOT, num_depths: int = 7) -> Tensor:
    """The log-probs of all tokens, [L, V] by token id."""
    marginals = session.propose(root_id, num_depths=num_depths, num_ranks=VOCAB_SIZE)
    return torch.empty_like(marginals.log_probs).scatter_(
        1, marginals.token_ids, marginals.log_probs
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_network_is_what_the_format_describes(variant: str) -> None:
    drafter, naive = pair_of(**VARIANTS[variant])
    num_depths = drafter.num_depths
    features = random_features(drafter)
    expected = naive.log_probs(features.double(), ROOT)
    # The prompt, then rounds of several sizes: the cache must not show.
    got = proposed(fed(drafter, features, 6, 1, 4), num_depths=num_depths)
    assert expected.shape == got.shape == (num_depths, VOCAB_SIZE)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-4)


def test_the_comparison_can_fail_positions_off_by_one_change_the_result() -> None:
    drafter, naive = pair_of()
    features = random_features(drafter)
    shifted = Naive(naive.raw, naive.weights, naive.embedding, naive.head, shift=1)
    difference = shifted.log_probs(features.double(), ROOT) - proposed(fed(drafter, features))
    assert difference.abs().max() > 0.05


def test_every_variant_changes_the_result() -> None:
    """Else a variant above would be tested by nothing."""
    plain, naive = pair_of()
    features = random_features(plain)
    for name, changes in VARIANTS.items():
        other, other_naive = pair_of(**changes)
        same_shapes = other_naive.weights.keys() == naive.weights.keys() and all(
            other_naive.weights[key].shape == value.shape for key, value in naive.weights.items()
        )
        if changes and same_shapes and other.num_depths == plain.num_depths:
            difference = proposed(fed(other, features)) - proposed(fed(plain, features))
            assert difference.abs().max() > 1e-2, name


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_embedding_and_head_are_the_targets_tied_or_not(architecture: str) -> None:
    model = tiny_model(architecture)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (architecture == "llama-tied")
    drafter, naive = pair_of(tiny_target(architecture))
    features = random_features(drafter)
    expected = naive.log_probs(features.double(), ROOT)
    torch.testing.assert_close(
        proposed(fed(drafter, features)).double(), expected, rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("variant", ["full", "sliding, by default causal", "soft cap"])
def test_marginals_are_distributions_sorted_from_high_to_low(variant: str) -> None:
    drafter, _ = pair_of(**VARIANTS[variant])
    with torch.inference_mode():
        marginals = fed(drafter, random_features(drafter)).propose(
            ROOT, num_depths=7, num_ranks=VOCAB_SIZE
        )
    torch.testing.assert_close(marginals.log_probs.exp().sum(dim=1), torch.ones(7))
    assert (marginals.log_probs[:, 1:] <= marginals.log_probs[:, :-1]).all()
    assert (marginals.log_probs <= 0).all()
    assert marginals.token_ids.sort(dim=1).values.eq(torch.arange(VOCAB_SIZE)).all()
    assert marginals.log_probs.dtype == torch.float32


def test_fewer_ranks_and_depths_are_the_first_of_all() -> None:
    drafter, _ = pair_of()
    session = fed(drafter, random_features(drafter))
    with torch.inference_mode():
        everything = session.propose(ROOT, num_depths=7, num_ranks=VOCAB_SIZE)
        some = session.propose(ROOT, num_depths=3, num_ranks=5)
        more_than_there_are = session.propose(ROOT, num_depths=1, num_ranks=10 * VOCAB_SIZE)
    torch.testing.assert_close(some.log_probs, everything.log_probs[:3, :5])
    assert some.token_ids.equal(everything.token_ids[:3, :5])
    assert more_than_there_are.num_ranks == VOCAB_SIZE


def test_perturb_sees_the_logits_before_they_are_ranked_and_normalised() -> None:
    drafter, _ = pair_of()
    features = random_features(drafter)
    seen: list[torch.Tensor] = []

    class ReversedRanks:
        def __call__(self, logits: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
            assert token_ids is None
            seen.append(logits)
            return -logits

        def weigh(self, changes: torch.Tensor) -> torch.Tensor:
            return -changes

        def keep(self, changes_behind: ChangesBehind) -> None:
            raise AssertionError("this drafter knows no transitions")

    session = fed(drafter, features)
    with torch.inference_mode():
        plain = session.propose(ROOT, num_depths=3, num_ranks=VOCAB_SIZE)
        turned = session.propose(ROOT, num_depths=3, num_ranks=4, perturb=ReversedRanks())
    (logits,) = seen
    assert logits.shape == (3, VOCAB_SIZE)
    assert turned.token_ids.equal(plain.token_ids.flip(1)[:, :4])
    torch.testing.assert_close(
        turned.log_probs, (-logits).log_softmax(-1).gather(1, turned.token_ids)
    )
    assert proposed(session, num_depths=3).equal(proposed(fed(drafter, features), num_depths=3))


def test_the_mask_token_may_be_drafted() -> None:
    """Its id is banned from nowhere: it may be a real token of the target."""
    drafter, naive = pair_of()
    log_probs = proposed(fed(drafter, random_features(drafter)))
    assert torch.isfinite(log_probs[:, naive.raw["dflash_config"]["mask_token_id"]]).all()


def test_a_proposal_leaves_no_trace() -> None:
    drafter, _ = pair_of()
    features = random_features(drafter)
    session = fed(drafter, features[:6])
    first = proposed(session)
    assert session.length == 6
    assert not proposed(session, root_id=ROOT + 1).equal(first)
    assert proposed(session).equal(first)
    with torch.inference_mode():
        feed(session, features[6:])
    torch.testing.assert_close(proposed(session), proposed(fed(drafter, features)))
    assert session.length == NUM_CONTEXT


def test_sessions_know_nothing_of_each_other() -> None:
    drafter, _ = pair_of()
    features = random_features(drafter)
    alone = proposed(fed(drafter, features))
    one, other = fed(drafter, features[:4]), fed(drafter, features.flip(0))
    proposed(other)
    with torch.inference_mode():
        feed(one, features[4:])
    proposed(other)
    torch.testing.assert_close(proposed(one), alone)


def test_memory_is_context_entries_alone() -> None:
    drafter, naive = pair_of()
    session = fed(drafter, random_features(drafter))
    proposed(session)
    entry_bytes = 2 * naive.raw["num_key_value_heads"] * naive.raw["head_dim"] * 4
    rows = session.num_bytes / (entry_bytes * naive.raw["num_hidden_layers"])
    enough = NUM_CONTEXT + naive.raw["block_size"]
    assert enough <= rows <= 2 * enough


def test_the_drafter_says_which_layers_and_how_many_depths_it_has() -> None:
    taps = {"mask_token_id": 3, "target_layer_ids": [3, 1]}
    drafter, _ = pair_of(block_size=5, dflash_config=taps)
    assert drafter.layer_ids == (3, 1)
    assert drafter.num_depths == 4


def test_a_sure_token_has_a_log_prob_of_zero_and_no_more() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.1, 0.2, 0.3]])
    marginals: Marginals = top_marginals(logits, 3)
    assert marginals.log_probs[0, 0] == 0
    assert marginals.token_ids[1].tolist() == [2, 1, 0]
