"""Is it right? Tokens, logits and noise, in float32 with tiny random models."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ddtree.attention.backends import BACKENDS, GROUPED, SPLIT
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.prefill import Context
from ddtree.sampling.noise import gumbel_noise
from ddtree.types import METHODS, DraftTree
from ddtree.verify import verify
from gpu.models import ScriptedDrafter, architectures, random_drafter, random_tree, tiny_model
from gpu.section import Report, Setup


def tokens(setup: Setup, report: Report) -> None:
    """ar, dflash and ddtree say the same, greedy and sampled, with a random and a knowing drafter.

    Whether the CPU's ar says it too is reported only: rounding may differ.
    """
    for architecture in architectures(setup):
        for backend in (GROUPED, SPLIT):
            if report.late(f"{architecture}, {backend}"):
                continue
            with report.case(f"{architecture}, {backend}"):
                model = tiny_model(architecture)
                model.config._attn_implementation = backend
                same_tokens(architecture, model, setup, report)


def same_tokens(name: str, model: PreTrainedModel, setup: Setup, report: Report) -> None:
    num_new = 5 if setup.small else 40
    prompt = [(7 * i) % 61 for i in range(12)]
    on_cpu = Pair(Target(model, None, name=name), None)
    target = Target(copy.deepcopy(model).to(setup.device), None, name=name)
    drafting = Pair(target, random_drafter(target, block_size=8, num_layers=2))
    for temperature in (0.0, 0.8):
        options = {"temperature": temperature, "seed": 7, "max_new_tokens": num_new}
        said = {
            method: drafting.generate(prompt, method=method, budget=16, **options)
            for method in METHODS
        }
        script = torch.tensor([*prompt, *said["ar"].token_ids], device=setup.device)
        knowing = Pair(target, ScriptedDrafter(script, target.vocab_size))
        said["knowing"] = knowing.generate(prompt, method="ddtree", budget=16, **options)
        there = on_cpu.generate(prompt, method="ar", **options)
        report.check(
            "Methods, token for token",
            len({generation.token_ids for generation in said.values()}) == 1,
            architecture=name,
            attention=target.backend,
            temperature=temperature,
            tokens=num_new,
            tau=f"{said['ddtree'].acceptance_length:.2f}",
            tau_knowing=f"{said['knowing'].acceptance_length:.2f}",
            cpu_agrees=there.token_ids == said["ar"].token_ids,
        )


def backends(setup: Setup, report: Report) -> None:
    """Every attention backend's logits against the CPU's eager ones in float32."""
    for architecture in architectures(setup):
        if report.late(architecture):
            continue
        with report.case(architecture):
            model = tiny_model(architecture)
            # Only weights of a usual size say anything in bfloat16.
            wide = architecture == "qwen3-wide"
            for dtype in (torch.float32, torch.bfloat16) if wide else (torch.float32,):
                same_logits(architecture, model, dtype, setup, report)


def same_logits(
    name: str, model: PreTrainedModel, dtype: torch.dtype, setup: Setup, report: Report
) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    tree = random_tree(17, 61)
    expected = logits_of(model, "eager", tree)
    there = copy.deepcopy(model).to(setup.device)
    for parameter in there.parameters():  # not the buffers: RoPE's frequencies stay exact
        parameter.data = parameter.data.to(dtype)
    errors = {}
    for backend in BACKENDS:
        with report.case(f"{name}, {backend}, {dtype}"):
            off = (logits_of(there, backend, tree) - expected).abs().max() / expected.abs().max()
            errors[backend] = float(off)
    report.check(
        "Logits of a tree of 17 rows behind 40 tokens: error over the largest logit",
        len(errors) == len(BACKENDS) and all(error <= tolerance for error in errors.values()),
        architecture=name,
        dtype=str(dtype).removeprefix("torch."),
        **{backend: f"{error:.1e}" for backend, error in errors.items()},
        tolerance=tolerance,
    )


def logits_of(model: PreTrainedModel, backend: str, tree: DraftTree) -> Tensor:
    """[1 + N, V] float32 on the CPU: of a prompt's last token and of a tree behind it."""
    model.config._attn_implementation = backend
    target = Target(model, None, name=backend)
    cache = target.new_cache(64)
    prompt = (torch.arange(40, device=target.device) * 7) % target.vocab_size
    first = target.prefill(prompt, cache).logits
    context = Context(cache, None, [0], ())
    return torch.cat([first, verify(target, context, tree).logits]).float().cpu()


def noise(setup: Setup, report: Report) -> None:
    """Whether noise by seed is the same on the device: as it is made, and were it made there."""
    vocab_size = 1000 if setup.small else 151936
    uniform = torch.arange(1, vocab_size + 1, dtype=torch.float32) / (vocab_size + 1)
    there = uniform.to(setup.device)
    pairs = {
        "gumbel_noise": (
            gumbel_noise(7, 100, vocab_size),
            gumbel_noise(7, 100, vocab_size, setup.device),
        ),
        "-log(-log1p(-u)) on the device": (
            -torch.log(-torch.log1p(-uniform)),
            -torch.log(-torch.log1p(-there)),
        ),
    }
    for name, (here, made) in pairs.items():
        off = (here - made.cpu()).abs()
        facts = {"differing": int((off > 0).sum()), "of": vocab_size, "most": f"{off.max():.1e}"}
        report.row("Noise, CPU against device", made=name, **facts)
