"""The engine's DFlash proposer, with trees in place of chains.

The engine runs the drafter as it does for chains; what differs is the end: hidden states become
marginals of every depth, and these become each request's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.v1.spec_decode.dflash import DFlashProposer

from ddtree.models.draft_vocabulary import read_draft_vocabulary
from ddtree.models.drafter_checkpoint import Z_LAB, DrafterDeclaration
from ddtree.models.drafter_weights import (
    TRANSITIONS_FILE,
    TRANSITIONS_PREFIX,
    opened_tensors,
)
from ddtree.models.folder import resolve_folder
from ddtree.models.loading import head_of_rows
from ddtree.models.packed import pack_linears
from ddtree.models.transitions import TransitionHead
from ddtree.serving.draft_head import DraftHead
from ddtree.serving.drafter_check import read_served_drafter
from ddtree.serving.drafting import BatchDrafting
from ddtree.serving.options import ServingOptions
from ddtree.serving.requests import RequestState
from ddtree.types import Marginals


class TreeProposer(DFlashProposer):
    """Proposes a tree for each request; see vLLM's `DFlashProposer`.

    The engine sizes its buffers for B draft tokens, which is the most nodes of a tree; the drafter
    itself drafts its own L depths.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.options: ServingOptions = runner.tree_options
        self.tree_runner = runner
        self.max_nodes = self.options.max_nodes
        self.declared = _declaration(self.draft_model_config.model)
        self.num_depths = min(self.declared.config.num_depths, self.max_nodes)
        self.head: DraftHead | None = None
        self.drafting: BatchDrafting | None = None  # the worker sets it when costs are known
        self.num_drafted = 0  # requests of the last pass
        self._hidden: Tensor | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, and find out what its end is."""
        super().load_model(target_model)
        if self.device.type == "cpu":
            _norm_each_layer(self.model.model)
        self.head = self._make_head()

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens of each request, parents before children; none for those that have no use.

        Arguments as vLLM's; `num_speculative_tokens` is not used: the budget decides.
        """
        assert self.drafting is not None, "costs are measured before the first step"
        num_requests = common_attn_metadata.batch_size()
        rows, requests = self.tree_runner.requests_to_draft()
        num_goes_on, prompt_rows = self.tree_runner.num_going_on, self.tree_runner.prompt_rows
        if not rows or not self.drafting.share.wants_drafts(num_goes_on, prompt_rows):
            self._keep_context(
                target_token_ids,
                target_positions,
                target_hidden_states,
                next_token_ids,
                common_attn_metadata,
                num_rejected_tokens_gpu,
            )
            return [[] for _ in range(num_requests)]
        super().propose(
            self.num_depths,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )
        self.num_drafted = len(rows)
        assert self._hidden is not None
        hidden = self._hidden.reshape(num_requests, self.num_depths, -1)[rows]
        said = self.marginals(hidden, requests)
        trees = self.drafting.trees(said, requests, num_goes_on - len(rows), prompt_rows)
        proposed: list[list[int]] = [[] for _ in range(num_requests)]
        for row, tree in zip(rows, trees, strict=True):
            proposed[row] = tree.token_ids[1:].tolist()
        return proposed

    def marginals(
        self, hidden: Float[Tensor, "R L D"], requests: Sequence[RequestState]
    ) -> list[Marginals]:
        """What the drafter says of each request; tests put scripts in its place."""
        assert self.head is not None
        assert self.drafting is not None
        return self.drafting.ask(self.head, hidden, requests)

    def _sample_draft_tokens(
        self, hidden_states: Tensor, sampling_metadata: Any
    ) -> tuple[Tensor, None]:
        """Keep the hidden states; what is returned is not looked at."""
        self._hidden = hidden_states
        return torch.zeros(len(hidden_states), dtype=torch.int64, device=hidden_states.device), None

    def _keep_context(
        self,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        common_attn_metadata: Any,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> None:
        """Let the drafter's cache take in the step, as a later draft needs it, and no more."""
        self.num_speculative_tokens = self.num_depths
        num_tokens, _, _ = self.set_inputs_first_pass(
            target_token_ids=target_token_ids,
            next_token_ids=next_token_ids,
            target_positions=target_positions,
            target_hidden_states=self.model.combine_hidden_states(target_hidden_states),
            token_indices_to_sample=None,
            cad=common_attn_metadata,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
        )
        self.build_model_inputs_first_pass(num_tokens, num_tokens, None)

    def _make_head(self) -> DraftHead:
        config = self.declared.config
        if self.declared.format != Z_LAB:
            return DraftHead(self.model.compute_logits)
        folder = resolve_folder(self.draft_model_config.model, argument="drafter")
        vocab_size = int(self.vllm_config.model_config.get_vocab_size())
        ids = read_draft_vocabulary(folder, config, vocab_size, folder.name)
        transitions = None
        if self.options.transitions and (folder / TRANSITIONS_FILE).exists():
            assert config.selector_rank is not None
            num_tokens = vocab_size if ids is None else len(ids)
            transitions = TransitionHead(num_tokens, config.selector_rank, config.hidden_size)
            with opened_tensors(folder / TRANSITIONS_FILE) as tensors:
                transitions.load_state_dict(
                    {
                        key.removeprefix(TRANSITIONS_PREFIX): tensors.get_tensor(key)
                        for key in tensors.keys()  # noqa: SIM118, no dict
                    }
                )
            transitions.to(self.device, self.dtype).requires_grad_(False)
        return DraftHead(
            self._logits_of(None if ids is None else ids.to(self.device)),
            draft_token_ids=None if ids is None else ids.to(self.device),
            transitions=transitions,
            num_candidates=config.selector_top_k,
        )

    def _logits_of(self, ids: Tensor | None) -> Any:
        """The head's columns that can be proposed."""
        compute = self.model.compute_logits
        if ids is None:
            return compute
        if get_tensor_model_parallel_world_size() > 1:
            return lambda hidden: compute(hidden)[:, ids]
        return pack_linears(head_of_rows(self.model.lm_head.weight[ids]))


def _norm_each_layer(network: Any) -> None:
    """Give every layer's context keys their own norm.

    vLLM 0.32 asks for all layers at once, and its kernel for CPUs takes the weights of layer 0 for
    all of them: texts stay right, drafts get worse.
    """
    weights, eps = network._k_norm_weights, network._rms_norm_eps

    def normalize(keys: Float[Tensor, "layers M KVH D"]) -> Float[Tensor, "layers M KVH D"]:
        scale = torch.rsqrt(keys.float().square().mean(dim=-1, keepdim=True) + eps)
        normed: Tensor = (keys.float() * scale).to(keys.dtype) * weights[:, None, None]
        return normed

    network._normalize_context_k = normalize


def _declaration(name: str) -> DrafterDeclaration:
    return read_served_drafter(resolve_folder(name, argument="drafter"), name)
