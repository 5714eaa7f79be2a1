"""What the plugin remembers of a request between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.lookup import Guessing
from ddtree.sampling.noise import Noise
from ddtree.types import DraftTree, Marginals, Method, Walk


@dataclass(kw_only=True)
class RequestState:
    """One request on this worker.

    Args:
        request_id: the engine's.
        token_ids: prompt and output so far; the last one is the root.
        method: how it is drafted.
        budget: the most nodes of its trees.
        noise: of its decoding rule; not asked where it is greedy.
        coupling: lends the noise to the drafter; None where it is greedy.
        guessing: finds the text's repetitions; None where that is switched off.
        max_length: how long the text may become, prompt included; None for no limit of its own.
        tree: what was proposed last, until the next step has verified it.
        drafted: what the drafter said for it, the guesses mixed in.
    """

    request_id: str
    token_ids: list[int]
    method: Method
    budget: int
    noise: Noise
    coupling: Coupling | None = None
    guessing: Guessing | None = None
    max_length: int | None = None
    tree: DraftTree | None = None
    drafted: Marginals | None = field(default=None, repr=False)

    @property
    def root_id(self) -> int:
        """The last decided token."""
        return self.token_ids[-1]

    @property
    def can_draft(self) -> bool:
        """Whether a draft could be of use: not for a text that ends with the next token."""
        return self.method != "ar" and self.budget > 0 and self.deepest != 0

    @property
    def deepest(self) -> int | None:
        """How deep a node may be to be delivered: the bonus token comes behind it; None: any."""
        if self.max_length is None:
            return None
        return max(0, self.max_length - len(self.token_ids) - 1)

    def take(self, walk: Walk) -> None:
        """The step is over: learn from what the target said."""
        self.token_ids.extend(walk.token_ids)
        if self.coupling is not None:
            self.coupling.observe(walk)
        if self.guessing is not None:
            self.guessing.learn(walk.token_ids)
        self.tree = self.drafted = None


class CouplingBook:
    """What the noise is worth to the drafter, by temperature; shared by all requests."""

    def __init__(self, num_depths: int) -> None:
        self._num_depths = num_depths
        self._weights: dict[float, CouplingWeights] = {}

    def coupling(self, temperature: float, noise: Noise) -> Coupling | None:
        """Of a request that samples at this temperature; None at 0."""
        if temperature <= 0:
            return None
        rounded = round(temperature, 1)  # or every request's own temperature would start anew
        weights = self._weights.setdefault(rounded, CouplingWeights(self._num_depths))
        return Coupling(temperature=temperature, noise=noise, weights=weights)
