"""Recipes: a TOML file that says how a drafter is made, section by section.

    target = "smollm2-135m"
    prompts = ["prompts.jsonl.gz"]      # beside the recipe

    [respond]                           # RespondConfig
    [network]                           # NetworkConfig
    [fit]                               # FitConfig
    [evaluate]                          # EvaluateConfig, and `prompts`

Every key may be left out; one that is not known is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ddtree.errors import OptionError
from ddtree.train.evaluate import EvaluateConfig
from ddtree.train.fit_config import FitConfig
from ddtree.train.network import NetworkConfig
from ddtree.train.respond import RespondConfig

Config = TypeVar("Config", RespondConfig, NetworkConfig, FitConfig, EvaluateConfig)
_TOP = ("target", "prompts", "responses", "start_from")
_SECTIONS = ("respond", "network", "fit", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter is made.

    Args:
        target: hub id, folder or alias.
        prompts: files that the target answers.
        responses: a file of answers that are there already; the target answers nothing then.
        start_from: a drafter to begin with, see `FitJob`.
        respond: options of stage respond.
        network: the drafter's shape.
        fit: options of stage fit.
        evaluate: options of stage evaluate.
        evaluate_prompts: held-out prompts, a suite a file; none: no evaluation.
    """

    target: str | None = None
    prompts: tuple[Path, ...] = ()
    responses: Path | None = None
    start_from: str | None = None
    respond: RespondConfig = field(default_factory=RespondConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    evaluate_prompts: tuple[Path, ...] = ()


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe; files that it names are looked for beside it.

    Raises:
        OptionError: unreadable, not TOML, an unknown key, or a value outside its range.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(
            f"recipe {path}",
            expected="a readable TOML file",
            got=str(error),
            remedy="See recipes/smollm2-135m/recipe.toml for an example.",
        ) from error
    _check_keys(raw, (*_TOP, *_SECTIONS), path, "")
    evaluate = _table(raw, "evaluate", path)
    responses, start_from = _text(raw, "responses", path), _text(raw, "start_from", path)
    if start_from is not None and (path.parent / start_from).is_dir():
        start_from = str(path.parent / start_from)
    return Recipe(
        target=_text(raw, "target", path),
        prompts=_files(raw, "prompts", path),
        responses=None if responses is None else path.parent / responses,
        start_from=start_from,
        respond=_config(RespondConfig, _table(raw, "respond", path), path, "respond"),
        network=_config(NetworkConfig, _table(raw, "network", path), path, "network"),
        fit=_config(FitConfig, _table(raw, "fit", path), path, "fit"),
        evaluate=_config(
            EvaluateConfig,
            {key: value for key, value in evaluate.items() if key != "prompts"},
            path,
            "evaluate",
        ),
        evaluate_prompts=_files(evaluate, "prompts", path),
    )


def _config(kind: type[Config], values: Mapping[str, Any], path: Path, section: str) -> Config:
    _check_keys(values, tuple(f.name for f in fields(kind)), path, f"[{section}] ")
    as_tuples: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    try:
        return kind(**as_tuples)
    except OptionError as error:
        raise OptionError(
            f"recipe {path}: [{section}] {error.argument}",
            expected=error.expected,
            got=error.got,
            remedy=error.remedy,
        ) from error
    except TypeError as error:
        raise _wrong(path, f"[{section}]", "values of the right kind", str(error)) from error


def _check_keys(raw: Mapping[str, Any], known: tuple[str, ...], path: Path, where: str) -> None:
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise OptionError(
            f"recipe {path}: {where}{unknown[0]}",
            expected=f"one of {', '.join(known)}",
            got="an unknown key",
            remedy="Correct or remove it.",
        )


def _table(raw: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(path, key, f"a section [{key}]", repr(value))
    return value


def _text(raw: Mapping[str, Any], key: str, path: Path) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(path, key, "a string", repr(value))
    return value


def _files(raw: Mapping[str, Any], key: str, path: Path) -> tuple[Path, ...]:
    value = raw.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(path, key, "a list of file names", repr(value))
    return tuple(path.parent / name for name in value)


def _wrong(path: Path, key: str, expected: str, got: str) -> OptionError:
    return OptionError(
        f"recipe {path}: {key}", expected=expected, got=got, remedy="Correct the recipe."
    )
