"""From one drafter format to the other: the same tensors, bit for bit, in the other's files.

No model is run or built. z-lab's format borrows the target's embedding and head and speculators'
carries both, so these two tensors of the target are read from its files: to be added, or to see
that what is left out says the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ddtree.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from ddtree.models import zoo
from ddtree.models.draft_vocabulary import VOCABULARY_FILE
from ddtree.models.drafter_checkpoint import (
    FORMATS,
    SPECULATORS,
    Z_LAB,
    DrafterCheckpoint,
    DrafterDeclaration,
    DrafterFormat,
    read_checkpoint,
    read_declaration,
)
from ddtree.models.drafter_export import PROVENANCE_FILE, config_json, write_folder
from ddtree.models.drafter_weights import opened_tensors
from ddtree.models.folder import CONFIG_PATTERNS, read_config, resolve_folder
from ddtree.models.loading import check_pair, read_target_shape
from ddtree.models.speculators import speculators_json
from ddtree.models.speculators_tensors import joined_tensors
from ddtree.models.target_ends import TargetEnds, own_ends, refuse_unusual_ends
from ddtree.provenance import origin

Say = Callable[[str], None]
_BYTES_AT_A_TIME = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was written.

    Args:
        folder: where.
        source_format: of what was read.
        format: of what was written.
        target: whose embedding and head were read, or None.
        num_tensors: in the file.
        draft_vocab_size: Vd, or None if every token can be proposed.
    """

    folder: Path
    source_format: DrafterFormat
    format: DrafterFormat
    target: str | None
    num_tensors: int
    draft_vocab_size: int | None


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What goes into the new folder, provenance apart."""

    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    token_ids: list[int] | None
    target: str | None


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Which target belongs to a drafter: as the user says, else as the drafter does."""

    given: str | None
    named: str | None
    drafter: str

    def needed(self) -> str:
        """Its name.

        Raises:
            OptionError: none is known, or the drafter names one that is not to be had.
        """
        if self.given is not None:
            return self.given
        if self.named is None:
            raise self._missing("none", None)
        try:
            resolve_folder(self.named, argument="target", patterns=CONFIG_PATTERNS)
        except ModelNotFoundError as error:
            got = f"none, and {self.named!r}, which it was made for, cannot be had"
            raise self._missing(got, error) from error
        return self.named

    def _missing(self, got: str, error: ModelNotFoundError | None) -> OptionError:
        return OptionError(
            "--target",
            expected=f"the target of {self.drafter}, whose embedding and head are read",
            got=got if error is None else f"{got} ({error.got})",
            remedy="Give its hub id or folder; nothing else of it is loaded.",
        )


def convert(
    source: str | Path,
    *,
    to: str,
    out: Path,
    target: str | None = None,
    say: Say | None = None,
) -> Conversion:
    """Write a drafter in the other format, in a folder that appears when it is whole.

    Args:
        source: a hub id, a local folder, or an embedded alias.
        to: "speculators" or "z-lab". What is in speculators' format already is written anew with
            the embedding and head that it carries; of these what it lacks is the target's.
        out: a new or empty folder, or one that an earlier conversion wrote.
        target: the drafter's target, by hub id, folder or alias. None takes the one that `source`
            names or is known to belong to. Only its embedding and head are read, and those only
            to write speculators' format, or where `source` carries some.
        say: told what takes long.

    Raises:
        OptionError: no such format, z-lab's again, no target where one is needed, an `out` that
            holds something else, or a drafter that the other format has no words for.
        UnsupportedModelError: an embedding or head of its own, for which z-lab's has no place.
        ModelNotFoundError, CheckpointError, PairMismatchError: see `load_drafter`.
        CacheWriteError: no room or no permission.
    """
    name = str(source)
    if to not in FORMATS:
        raise OptionError(
            "--to", expected=" or ".join(FORMATS), got=repr(to), remedy="Name one of these formats."
        )
    folder = resolve_folder(name, argument="drafter", say=say)
    _check_out(out, folder)
    declared = read_declaration(folder, name)
    if to == declared.format == Z_LAB:
        raise OptionError(
            "--to",
            expected=f"another format than {name} has",
            got=repr(to),
            remedy="It is in this format already: use it as it is.",
        )
    asked = _Target(given=target, named=declared.verifier or _known_target(name), drafter=name)
    convert_content = _in_z_lab if to == Z_LAB else _in_speculators
    content = convert_content(folder, declared, asked, name, say)
    before = folder / PROVENANCE_FILE
    provenance = {
        "conversion": {
            **origin(),
            "source": name,
            "from": declared.format,
            "to": to,
            "target": content.target,
            "weights_sha256": {p.name: _sha256(p) for p in sorted(folder.glob("*.safetensors"))},
        },
        "before": read_config(folder, "drafter", PROVENANCE_FILE) if before.exists() else None,
    }
    files: dict[str, object] = {"config.json": content.config, PROVENANCE_FILE: provenance}
    if content.token_ids is not None:
        files[VOCABULARY_FILE] = {"token_ids": content.token_ids}
    texts = {file: json.dumps(value, indent=1) + "\n" for file, value in files.items()}
    write_folder(out, texts, content.tensors)
    return Conversion(
        folder=out,
        source_format=declared.format,
        format=SPECULATORS if to == SPECULATORS else Z_LAB,
        target=content.target,
        num_tensors=len(content.tensors),
        draft_vocab_size=declared.config.draft_vocab_size,
    )


def _check_out(out: Path, source: Path) -> None:
    """Only what this command wrote is replaced, and never what it reads."""
    try:
        if not out.exists():
            return
        if not out.samefile(source) and not any(out.iterdir()):
            return
        record = json.loads((out / PROVENANCE_FILE).read_text(encoding="utf-8"))
        ours = isinstance(record, dict) and "conversion" in record
    except (OSError, ValueError):
        ours = False
    if not ours or out.samefile(source):
        raise OptionError(
            "--out",
            expected="a new or empty folder, or one that `ddtree convert` wrote before",
            got=f"{out}, which is the source" if out.samefile(source) else str(out),
            remedy="Name another folder: this one is left as it is.",
        )


def _known_target(name: str) -> str | None:
    """The target of a drafter that this package knows."""
    if zoo.is_embedded(name):
        return name
    return next((t for t, drafter in zoo.KNOWN_DRAFTERS.items() if drafter == name), None)


def _in_speculators(
    folder: Path, declared: DrafterDeclaration, asked: _Target, name: str, say: Say | None
) -> _Content:
    """Embedding and head, its own or the target's, and the vocabulary's map are added."""
    target = asked.needed()
    shape = read_target_shape(target)
    check_pair(declared.config, shape, name)
    read = read_checkpoint(folder, declared, vocab_size=shape.vocab_size, name=name)
    ends = read_target_ends(target, say=say)
    own_ends(read, ends, name)  # refuses broken ones
    config = speculators_json(
        declared.config,
        vocab_size=ends.embedding.shape[0],
        dtype=_dtype(read.tensors),
        verifier=target,
        architectures=ends.architectures,
    )
    head, token_ids = read.head, read.draft_token_ids
    if head is None:
        head = ends.head if token_ids is None else ends.head[token_ids]
    tensors = joined_tensors(
        read.tensors,
        draft_token_ids=token_ids,
        embedding=ends.embedding if read.embedding is None else read.embedding,
        head=head,
    )
    return _Content(config=config, tensors=tensors, token_ids=None, target=target)


def _in_z_lab(
    folder: Path, declared: DrafterDeclaration, asked: _Target, name: str, say: Say | None
) -> _Content:
    """What is the target's is left out, once it is seen to be."""
    config = declared.config
    assert config.vocab_size is not None
    read = read_checkpoint(folder, declared, vocab_size=config.vocab_size, name=name)
    has_ends = read.embedding is not None or read.head is not None
    target = asked.needed() if has_ends else asked.given
    if target is not None:
        shape = read_target_shape(target)
        check_pair(config, shape, name)
        config = replace(config, num_target_layers=shape.num_layers)
    if has_ends and target is not None:
        _refuse_own_ends(read, read_target_ends(target, say=say), name)
    dtype = str(_dtype(read.tensors)).removeprefix("torch.")
    token_ids = None if read.draft_token_ids is None else read.draft_token_ids.tolist()
    return _Content(
        config={**config_json(config), "torch_dtype": dtype},
        tensors=read.tensors,
        token_ids=token_ids,
        target=target,
    )


def _refuse_own_ends(read: DrafterCheckpoint, ends: TargetEnds, name: str) -> None:
    for end in own_ends(read, ends, name).found:
        raise UnsupportedModelError(
            f"drafter {name}: {end.key}",
            expected=f"the numbers of target {ends.name}, which z-lab's format borrows",
            got=end.difference,
            remedy="Check that this is the drafter's target. If it is, stay with speculators' "
            "format: to leave out what is the drafter's own would change what it drafts.",
        )


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return tensors["fc.weight"].dtype


def read_target_ends(name: str, *, say: Say | None = None) -> TargetEnds:
    """Embedding and head of a target from its files; no other tensor is read.

    Args:
        name: a hub id, a local folder, or an embedded alias.
        say: told what takes long.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `load_target`.
    """
    folder = resolve_folder(name, argument="target", say=say)
    # Without weights: it tells where the two tensors are, whether they are tied, and what they do.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    refuse_unusual_ends(embedding, head, name)
    rows = _stored(folder, _tensor_name(model, embedding), embedding.weight, name)
    is_tied = head.weight is embedding.weight
    head_rows = rows if is_tied else _stored(folder, _tensor_name(model, head), head.weight, name)
    architectures = read_config(folder, "target").get("architectures")
    return TargetEnds(
        name=name,
        embedding=rows,
        head=head_rows,
        architectures=tuple(map(str, architectures or ())),
    )


def _tensor_name(model: nn.Module, module: nn.Module) -> str:
    (path,) = [path for path, each in model.named_modules() if each is module]
    return f"{path}.weight"


def _stored(folder: Path, tensor_name: str, like: Tensor, name: str) -> Tensor:
    """One tensor out of a folder of safetensors files, as it is stored."""
    found: Tensor | None = None
    for file in sorted(folder.glob("*.safetensors")):
        with opened_tensors(file) as opened:
            if tensor_name in opened.keys():  # noqa: SIM118, a safetensors handle is no dict
                found = opened.get_tensor(tensor_name)
    is_float = found is not None and found.is_floating_point() and found.itemsize > 1
    if found is None or found.shape != like.shape or not is_float:
        got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
        raise CheckpointError(
            f"target {name}: {tensor_name}",
            expected=f"a tensor {list(like.shape)} of floating point numbers in *.safetensors",
            got=got,
            remedy="Give the target's own checkpoint, not a quantised one.",
        )
    return found


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(_BYTES_AT_A_TIME):
            digest.update(part)
    return digest.hexdigest()
