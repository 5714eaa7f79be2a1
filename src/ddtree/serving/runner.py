"""The engine's model runner, verifying trees: what differs from vLLM's, and nothing else.

A step in the engine's order:

    _prepare_inputs            which rows are which tree; positions by depth
    _build_attention_metadata  who sees whom
    (the model runs)
    _sample                    the target's choice at every row, the walk, keys and values moved
    propose_draft_token_ids    rows put in the order of the accepted path, then drafts

Slots in the cache stay one after another for a step's rows, so the engine's bookkeeping needs no
change: it sees a list of draft tokens, of which some first ones were accepted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ddtree.errors import OptionError
from ddtree.sampling.lookup import Guessing, new_weights
from ddtree.sampling.noise import Noise
from ddtree.serving.choosing import Chosen, choose_rows, choose_visited_rows
from ddtree.serving.drafting import BatchDrafting
from ddtree.serving.measuring import measured_costs
from ddtree.serving.options import RequestOptions, request_options, serving_options
from ddtree.serving.path_logprobs import logprobs_along_paths, wants_processed
from ddtree.serving.requests import CouplingBook, RequestState
from ddtree.serving.row_paths import RequestRule, StepRows, seed_of
from ddtree.serving.shared_budget import AutoShare, FixedShare, SharedBudget
from ddtree.serving.step import Moves, Step, chain_of, scheduled_tree
from ddtree.types import Walk

T = TypeVar("T")


class TreeModelRunner(GPUModelRunner):
    """See the module; mixed into the runner of a platform by that platform's module."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.tree_options = serving_options(
            vllm_config.additional_config,
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        )
        super().__init__(vllm_config, device)
        self.tree_states: dict[str, RequestState] = {}
        self._step: Step | None = None
        self._walks: Sequence[Walk] = ()
        self._lookup_weights = new_weights()
        self._couplings = CouplingBook(self.drafter.num_depths)
        self._began = time.perf_counter()

    # What the engine calls ------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """As vLLM's; the step's time begins here."""
        self._began = time.perf_counter()
        self.drafter.num_drafted = 0
        return super().execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; the step's time ends here, with the drafts for the next one."""
        step = self._step
        output = super().sample_tokens(grammar_output)
        self._step = None
        if step is not None:
            self.drafter.drafting.share.observe_seconds(
                self._of_first_rank(time.perf_counter() - self._began),
                num_rows=step.num_rows,
                num_drafted=self.drafter.num_drafted,
            )
        return output

    def _update_states(self, scheduler_output: Any) -> Any:
        """Forget what has ended, and the drafts of what has to wait."""
        for request_id in scheduler_output.finished_req_ids:
            self.tree_states.pop(request_id, None)
        for request_id in scheduler_output.preempted_req_ids or ():
            if (state := self.tree_states.get(request_id)) is not None:
                state.tree = state.drafted = None
        corrections = super()._update_states(scheduler_output)
        # Our noise needs none, and vLLM 0.32 would turn them back where a prompt is read in chunks,
        # which those of a CPU cannot.
        self.input_batch.generators.clear()
        return corrections

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Positions of tree rows are their depths'; slots stay as the engine laid them out."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._step = self._plan(scheduler_output, num_scheduled_tokens)
        self._set_positions(self._step, self._step.positions())
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Tell attention who sees whom."""
        metadata, for_drafter = super()._build_attention_metadata(*args, **kwargs)
        step = self._step
        if step is not None and step.branching and not kwargs.get("for_cudagraph_capture"):
            self._attach_trees(step, metadata)
        return metadata, for_drafter

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """The walk: what the target says along the trees, by our decoding rule."""
        assert self._step is not None
        assert spec_decode_metadata is not None
        step = self._step
        self.input_batch.update_async_output_token_ids()
        metadata = self.input_batch.sampling_metadata
        chosen = self._choose(logits, step, metadata)
        walks = self._walks = step.walk(chosen.token_ids.tolist())
        if (moves := step.moves(walks)) is not None:
            self._move(moves)
        self._hear(step, walks)
        said = self._padded([walk.token_ids for walk in walks], spec_decode_metadata.max_spec_len)
        return SamplerOutput(
            sampled_token_ids=said.to(torch.int32),
            logprobs_tensors=self._logprobs(logits, chosen, step, walks, said, metadata),
        )

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: Sequence[Tensor] | None,
        *others: Any,
    ) -> Any:
        """The drafter reads accepted rows where it would look for those of a chain."""
        assert self._step is not None
        step = self._step
        if self._permutes_context(step):
            order = self._on_device(step.order(self._walks))
            hidden_states = hidden_states[order]
            if aux_hidden_states is not None:
                aux_hidden_states = [states[order] for states in aux_hidden_states]
            self.input_ids.gpu[: step.num_rows] = self.input_ids.gpu[order]
        self._set_positions(step, step.linear_positions())
        return super().propose_draft_token_ids(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            *others,
        )

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        """Where the engine would schedule zeros, because the text is nearly too long: nothing."""
        if zeros_only:
            self._draft_token_ids: list[list[int]] = [[] for _ in self.input_batch.req_ids]
        super()._copy_draft_token_ids_to_cpu(scheduler_output, zeros_only)

    # What the proposer asks -----------------------------------------------------------------------

    @property
    def target_layers(self) -> dict[str, Any]:
        """The target's attention layers by name, without the drafter's."""
        layers = self.compilation_config.static_forward_context
        drafting = self.drafter._draft_attn_layer_names
        # Others than attention layers, such as experts, may be there too.
        return {
            name: layer
            for name, layer in layers.items()
            if name not in drafting and hasattr(layer, "impl")
        }

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts in this step: the best guess of how many the next one has."""
        assert self._step is not None
        decoding = sum(self._step.trees[i].num_rows for i in self._step.decoding)
        return self._step.num_rows - decoding

    @property
    def num_going_on(self) -> int:
        """Requests that the next step decodes."""
        num_requests = int(self.input_batch.num_reqs)
        return num_requests - int(self.discard_request_mask.np[:num_requests].sum())

    def requests_to_draft(self) -> tuple[list[int], list[RequestState]]:
        """Places in the batch of the requests that a draft is of use to, and what we know of them.

        Those whose prompt is still being read are left out, and those that have opted out.
        """
        waiting = self.discard_request_mask.np
        found = [
            (i, state)
            for i, request_id in enumerate(self.input_batch.req_ids)
            if not waiting[i] and (state := self.tree_states[request_id]).can_draft
        ]
        return [i for i, _ in found], [state for _, state in found]

    def prepare_share(self) -> None:
        """Decide how nodes are shared; where that takes measurements, this is their time."""
        options = self.tree_options
        share: SharedBudget
        if options.budget == "auto":
            costs = self._of_first_rank(measured_costs(self))  # all ranks run, one clock counts
            share = AutoShare(
                costs,
                num_depths=self.drafter.num_depths,
                max_nodes=options.max_nodes,
                max_batch_rows=options.max_batch_rows,
            )
        else:
            share = FixedShare(options.max_nodes, options.max_batch_rows)  # each has its own
        self.drafter.drafting = BatchDrafting(
            share,
            vocab_size=self.input_batch.vocab_size,
            max_nodes=self.tree_options.max_nodes,
        )

    # The parts ------------------------------------------------------------------------------------

    def _plan(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Step:
        request_ids = self.input_batch.req_ids
        drafts = scheduler_output.scheduled_spec_decode_tokens
        trees = []
        for request_id in request_ids:
            state, tokens = self.tree_states.get(request_id), drafts.get(request_id, ())
            if state is None or not tokens:
                trees.append(chain_of(0, tokens))
            else:
                trees.append(scheduled_tree(state.tree, state.root_id, tokens))
        counts = np.array([tree.num_rows for tree in trees])
        ends = num_scheduled_tokens.cumsum()
        before = self.input_batch.num_computed_tokens_cpu[: len(request_ids)]
        root_positions = before + num_scheduled_tokens - counts
        is_decoding = (num_scheduled_tokens == counts) & (
            root_positions >= self.input_batch.num_prompt_tokens[: len(request_ids)]
        )
        return Step(
            tuple(trees),
            (ends - counts).astype("int64"),
            root_positions.astype("int64"),
            num_rows=int(ends[-1]),
            decoding=tuple(is_decoding.nonzero()[0].tolist()),
        )

    def _set_positions(self, step: Step, positions: ndarray) -> None:
        if step.branching:
            self.positions[self._on_device(step.branching_rows)] = self._on_device(positions)

    def _attach_trees(self, step: Step, metadata: dict[str, Any]) -> None:
        index = self._on_device(step.branching_rows)
        for each in {id(m): m for m in metadata.values()}.values():
            each.trees = step.tree_rows(each.block_table, self.device)
            each.tree_row_index = index
            each.all_rows_are_trees = len(step.branching_rows) == each.num_actual_tokens

    def _choose(self, logits: Tensor, step: Step, metadata: Any) -> Chosen:
        # On a CPU rows that the walk does not come to are work; elsewhere waiting for it is.
        choose = choose_visited_rows if self.device.type == "cpu" else choose_rows
        return choose(
            logits,
            StepRows.of(step.trees),
            metadata,
            [self._rule(request_id) for request_id in self.input_batch.req_ids],
            keep_processed=wants_processed(metadata, self.sampler),
        )

    def _rule(self, request_id: str) -> RequestRule:
        state, request = self._state(request_id), self.requests[request_id]
        return RequestRule(
            noise=state.noise,
            num_tokens=len(state.token_ids),
            sampling_params=request.sampling_params,
            output_token_ids=request.output_token_ids,
        )

    def _state(self, request_id: str) -> RequestState:
        if request_id not in self.tree_states:
            self.tree_states[request_id] = self._new_state(request_id)
        return self.tree_states[request_id]

    def _new_state(self, request_id: str) -> RequestState:
        request, options = self.requests[request_id], self.tree_options
        params = request.sampling_params
        try:
            wanted = request_options(params.extra_args, max_nodes=options.max_nodes)
        except OptionError:
            wanted = RequestOptions()  # refused where the request came in; the engine must go on
        method = wanted.method or options.method
        # A grammar's masks are made for the draft tokens one after another.
        if method == "ddtree" and params.structured_outputs is not None:
            method = "dflash"
        # A budget of thoughts is kept by the engine, one row for each request.
        if params.thinking_token_budget is not None:
            method = "ar"
        budget = options.max_nodes if options.budget == "auto" else options.budget
        noise = Noise(seed_of(params.seed, request_id))
        prompt = request.prompt_token_ids
        return RequestState(
            request_id=request_id,
            token_ids=[*prompt, *request.output_token_ids],
            method=method,
            budget=budget if wanted.budget is None else wanted.budget,
            noise=noise,
            coupling=self._couplings.coupling(params.temperature, noise),
            guessing=Guessing(self._lookup_weights) if options.lookup else None,
            max_length=None if params.max_tokens is None else len(prompt) + params.max_tokens,
        )

    def _hear(self, step: Step, walks: Sequence[Walk]) -> None:
        """Each request whose token counts goes on; the budget learns of those that drafted."""
        waiting = self.discard_request_mask.np
        heard, decoding = [], step.decoding
        for i, request_id in enumerate(self.input_batch.req_ids):
            if waiting[i]:
                continue
            state = self.tree_states[request_id]
            if state.drafted is not None:
                heard.append((state.drafted, walks[i]))
            state.take(walks[i])
        self.drafter.drafting.share.observe_walks(
            heard,
            num_requests=len(decoding),
            num_tokens=sum(len(walks[i].token_ids) for i in decoding),
        )

    def _move(self, moves: Moves) -> None:
        """Accepted keys and values go where plain decoding would have put them."""
        for layer in self.target_layers.values():
            layer.impl.move_rows(layer, moves)

    def _permutes_context(self, step: Step) -> bool:
        return bool(step.branching)

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> Int64[Tensor, "R W"]:
        padded = torch.full((len(rows), width + 1), -1, dtype=torch.int64)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = torch.tensor(row)
        return padded.to(self.device)

    def _logprobs(
        self,
        logits: Tensor,
        chosen: Chosen,
        step: Step,
        walks: Sequence[Walk],
        said: Int64[Tensor, "R X"],
        metadata: Any,
    ) -> LogprobsTensors | None:
        return logprobs_along_paths(
            logits,
            chosen,
            self._on_device(step.walked_rows(walks, said.shape[1])),
            said,
            metadata=metadata,
            sampler=self.sampler,
        )

    def _of_first_rank(self, measured: T) -> T:
        """Ranks must decide alike, and their clocks differ."""
        group = get_tp_group()
        return group.broadcast_object(measured) if group.world_size > 1 else measured

    def _on_device(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self.device)
