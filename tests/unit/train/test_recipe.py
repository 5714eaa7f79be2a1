"""Recipes: what they say is what is done, and what they get wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree.errors import OptionError
from ddtree.train.recipe import Recipe, read_recipe

SHIPPED = Path(__file__).parents[3] / "recipes" / "smollm2-135m" / "recipe.toml"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, "")) == Recipe()


def test_every_section_reaches_its_stage_and_files_lie_beside_the_recipe(tmp_path: Path) -> None:
    recipe = read_recipe(
        write(
            tmp_path,
            """
            target = "some/model"
            prompts = ["a.jsonl", "b/c.jsonl.gz"]
            responses = "answers.jsonl"
            start_from = "some/drafter"
            [respond]
            num_rows = 4
            [network]
            target_layer_ids = [1, 5]
            [fit]
            learning_rate = 1
            [evaluate]
            prompts = ["held-out.jsonl"]
            budgets = [4, 8]
            """,
        )
    )
    assert recipe.target == "some/model"
    assert recipe.prompts == (tmp_path / "a.jsonl", tmp_path / "b/c.jsonl.gz")
    assert recipe.responses == tmp_path / "answers.jsonl"
    assert recipe.start_from == "some/drafter"
    assert recipe.respond.num_rows == 4
    assert recipe.network.target_layer_ids == (1, 5)
    assert recipe.fit.learning_rate == 1
    assert recipe.evaluate.budgets == (4, 8)
    assert recipe.evaluate_prompts == (tmp_path / "held-out.jsonl",)


def test_a_drafter_beside_the_recipe_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    recipe = read_recipe(write(tmp_path, 'start_from = "first"'))
    assert recipe.start_from == str(tmp_path / "first")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = ", "TOML"),
        ("targets = 'x'", "targets: expected one of target, prompts"),
        ("[fit]\nstep = 3", r"\[fit\] step: expected one of num_steps"),
        ("[fit]\nnum_steps = 0", r"\[fit\] num_steps: expected a whole number >= 1, got 0"),
        ("[fit]\nlearning_rate = 'fast'", r"\[fit\] learning_rate: expected a number > 0"),
        ("[network]\nblock_size = 1", r"\[network\] block_size: expected a whole number >= 2"),
        ("[network]\ntarget_layer_ids = 3", r"\[network\]"),
        ("[network]\ntarget_layer_ids = ['a']", r"\[network\]"),
        ("[respond]\nnum_rows = 'x'", r"\[respond\]"),
        ("fit = 3", "a section"),
        ("prompts = 'a.jsonl'", "a list of file names"),
        ("target = 3", "a string"),
    ],
)
def test_mistakes_are_named_with_file_and_section(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        read_recipe(write(tmp_path, text))
    assert "recipe.toml" in str(raised.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a readable TOML file"):
        read_recipe(tmp_path / "none.toml")


def test_the_shipped_recipe_is_right_and_its_files_are_there() -> None:
    recipe = read_recipe(SHIPPED)
    assert recipe.target == "smollm2-135m"
    assert recipe.responses is not None
    assert recipe.responses.exists()
    assert recipe.start_from is not None
    assert Path(recipe.start_from).is_dir()
    assert recipe.fit.num_steps > 1000
