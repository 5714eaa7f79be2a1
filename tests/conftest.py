"""What all tests share: shapes in annotations are checked, examples are repeatable, one thread."""

import sys
from collections.abc import Iterator

import jaxtyping
import pytest
from jaxtyping import install_import_hook

import tests.support.typecheck  # noqa: F401, the hook finds it by attribute

# Where tensors flow. Not the public edge: a user's mistake must meet our error, not a type checker.
TENSOR_MODULES = [
    "ddtree.attention",
    "ddtree.cache",
    "ddtree.commit",
    "ddtree.draft",
    "ddtree.host_marginals",
    "ddtree.models.delta_rule",
    "ddtree.models.dflash2",
    "ddtree.models.drafter",
    "ddtree.models.drafter_network",
    "ddtree.models.recurrent",
    "ddtree.models.medusa",
    "ddtree.models.pard",
    "ddtree.models.target",
    "ddtree.prefill",
    "ddtree.sampling",
    "ddtree.serving.device_steps",
    "ddtree.serving.draft_head",
    "ddtree.serving.drafting",
    "ddtree.serving.kept",
    "ddtree.serving.paged_attention",
    "ddtree.serving.requests",
    "ddtree.serving.row_paths",
    "ddtree.serving.shared_budget",
    "ddtree.serving.step",
    "ddtree.serving.step_costs",
    "ddtree.serving.tree_keys",
    "ddtree.serving.tree_rows",
    "ddtree.tree",
    "ddtree.types",
    "ddtree.verify",
    "ddtree.walk",
]
# A module imported before the hook would run unchecked, and no test would say so.
assert not any(name.split(".")[0] == "ddtree" for name in sys.modules)
install_import_hook(TENSOR_MODULES, "tests.support.typecheck.check")

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Derandomised: a run in CI sees the examples that a run at home saw, and cannot flake.
settings.register_profile(
    "ddtree",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ddtree")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _profiles_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs of tiny models are kept apart from the user's, and found again by later tests."""
    folder = tmp_path_factory.getbasetemp() / "profiles"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree.models.zoo.profiles_folder", lambda: folder)
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not checked: as a user runs, who must be told by our own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
