"""A DFlash `config.json` is read as CHECKPOINTS A says, and what would be wrong is refused."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.errors import CheckpointError, UnsupportedModelError, UserError
from ddtree.models.drafter_config import DrafterConfig, parse_drafter_config
from ddtree.models.drafter_network import DFlashNetwork
from tests.support.checkpoints import drafter_shapes
from tests.support.models import drafter_config

FULL, SLIDING = "full_attention", "sliding_attention"
MASK_AND_TAPS = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
# What DFlash2 adds, as it is published.
SECOND = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


def parse(**changes: object) -> DrafterConfig:
    raw = {k: v for k, v in drafter_config(**changes).items() if v is not None}
    return parse_drafter_config(raw, "here/config.json")


def nested(**keys: object) -> dict[str, object]:
    return {"dflash_config": {**MASK_AND_TAPS, **keys}}


def test_every_plain_key_is_read() -> None:
    config = parse(
        block_size=16,
        num_target_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-5,
        attention_bias=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
        dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    )
    assert config == DrafterConfig(
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-5,
        attention_bias=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        windows=(None,) * 5,
        causal=(False,) * 5,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        input_embedding_scale=1.0,
    )


@pytest.mark.parametrize(
    ("key", "attribute", "top", "inside"),
    [
        ("block_size", "block_size", 16, 4),
        ("mask_token_id", "mask_token_id", 1, 2),
        ("target_layer_ids", "target_layer_ids", [0], [1, 3]),
        ("num_target_layers", "num_target_layers", 4, 5),
        ("output_multiplier", "output_multiplier", 0.5, 0.25),
        ("final_logit_softcapping", "final_logit_softcapping", 20.0, 30.0),
        ("input_embedding_scale", "input_embedding_scale", 2.0, 3.0),
        ("rms_norm_eps", "rms_norm_eps", 1e-5, 1e-4),
        ("vocab_size", "vocab_size", 61, 62),
    ],
)
def test_a_nested_key_wins_and_a_top_level_one_is_found(
    key: str, attribute: str, top: object, inside: object
) -> None:
    def read(**changes: object) -> object:
        value = getattr(parse(**changes), attribute)
        return list(value) if isinstance(value, tuple) else value

    others = {k: v for k, v in MASK_AND_TAPS.items() if k != key}
    assert read(**{key: top}, dflash_config=others) == top
    assert read(**{key: top}, dflash_config={**others, key: inside}) == inside
    assert read(**{key: top}, dflash_config={**others, key: None}) == top


@pytest.mark.parametrize(
    ("depth", "num_layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (24, 2, (1, 21)),
        (40, 6, (1, 8, 15, 23, 30, 37)),
    ],
)
def test_taps_left_out_follow_the_rule_of_older_checkpoints(
    depth: int, num_layers: int, expected: tuple[int, ...]
) -> None:
    config = parse(
        num_target_layers=depth,
        num_hidden_layers=num_layers,
        dflash_config={"mask_token_id": 3},
    )
    assert config.target_layer_ids == expected


def test_the_number_of_taps_need_not_be_the_drafters_depth() -> None:
    taps = [1, 6, 11, 16, 22, 27, 32, 37]
    assert parse(**nested(target_layer_ids=taps)).target_layer_ids == tuple(taps)


def test_what_may_be_left_out_is_left_out() -> None:
    config = parse(vocab_size=None, num_target_layers=None, rms_norm_eps=None, hidden_act=None)
    assert config.vocab_size is None
    assert config.num_target_layers is None
    assert config.rms_norm_eps == 1e-6


@pytest.mark.parametrize("architectures", [["DFlash2DraftModel"], ["DFlashDraftModel"], None])
def test_the_second_version_is_told_by_its_keys(architectures: list[str] | None) -> None:
    config = parse(architectures=architectures, **nested(**SECOND))
    assert config.is_dflash2
    assert {key: getattr(config, key) for key in SECOND} == SECOND
    flat = parse(architectures=["DFlash2DraftModel"], dflash_config=None, **MASK_AND_TAPS, **SECOND)
    assert flat == config
    assert not parse().is_dflash2
    assert parse().selector_rank is None


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"layer_types": [FULL, FULL], "sliding_window": 8}, (None, None), (False, False)),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8}, (8, None), (True, False)),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8}, (8, 8), (True, True)),
        (
            {"layer_types": [SLIDING] * 2, "sliding_window": 8, "is_causal": False},
            (8, 8),
            (False, False),
        ),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": 8, "is_causal": True},
            (8, None),
            (True, True),
        ),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"use_sliding_window": True, "sliding_window": 8}, (8, 8), (True, True)),
        ({"use_sliding_window": False, "sliding_window": 8}, (None, None), (False, False)),
        ({"use_sliding_window": True}, (None, None), (False, False)),
        (nested(layer_types=[FULL, SLIDING], sliding_window=4), (None, 4), (False, True)),
        (nested(is_causal=True), (None, None), (True, True)),
    ],
)
def test_windows_and_causality_per_layer(
    changes: dict[str, object],
    windows: tuple[int | None, ...],
    causal: tuple[bool, ...],
) -> None:
    config = parse(**changes)
    assert config.windows == windows
    assert config.causal == causal


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 1e7}},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        ({"rope_theta": 1.5e5, "rope_scaling": YARN}, {**YARN, "rope_theta": 1.5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        ({"rope_theta": 1e4, "rope_scaling": {}}, {"rope_type": "default", "rope_theta": 1e4}),
        (nested(rope_theta=7.0), {"rope_type": "default", "rope_theta": 7.0}),
    ],
)
def test_the_drafters_own_rope_is_read_from_both_spellings(
    changes: dict[str, object], expected: dict[str, object]
) -> None:
    assert parse(**changes).rope_parameters == expected


REFUSED = [
    ({"speculators_model_type": "dflash"}, "speculators"),
    (nested(projector_type="domino"), "projector_type 'domino'"),
    (nested(projector_type="dspark"), "projector_type 'dspark'"),
    ({"projector_type": "domino"}, "projector_type 'domino'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    ({"attention_value_scale": 0.5}, "attention_value_scale"),
    ({"attention_sink_bias": True}, "attention_sink_bias"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": None}, "Qwen3ForCausalLM"),
    ({"architectures": None, "dflash_config": None}, "without a dflash_config"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=str)
def test_what_would_be_silently_wrong_is_refused_by_name(
    changes: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(**changes)
    assert named in caught.value.got
    assert "here/config.json" in str(caught.value)
    assert caught.value.remedy


def test_a_whole_rotary_factor_is_no_partial_one() -> None:
    assert parse(partial_rotary_factor=1.0) == parse()


def test_the_format_is_told_by_architecture_or_by_dflash_config() -> None:
    assert parse(architectures=None) == parse()
    flat = parse(dflash_config=None, **MASK_AND_TAPS)
    assert flat == parse()


BROKEN = [
    ({"block_size": None}, "block_size", "None"),
    ({"block_size": 1}, "block_size", "1"),
    ({"block_size": 8.0}, "block_size", "8.0"),
    (nested(block_size="8"), "block_size", "'8'"),
    (nested(block_size=True), "block_size", "True"),
    ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id", "None"),
    (nested(mask_token_id=-1), "mask_token_id", "-1"),
    ({"dflash_config": [1]}, "mask_token_id", "None"),
    (nested(target_layer_ids=[]), "target_layer_ids", "[]"),
    (nested(target_layer_ids=[0, 0]), "target_layer_ids", "[0, 0]"),
    (nested(target_layer_ids=[-1, 2]), "target_layer_ids", "[-1, 2]"),
    (nested(target_layer_ids=[0.0]), "target_layer_ids", "[0.0]"),
    (nested(target_layer_ids=[True, 2]), "target_layer_ids", "[True, 2]"),
    (nested(target_layer_ids=2), "target_layer_ids", "2"),
    ({"dflash_config": {"mask_token_id": 3}}, "num_target_layers", "4"),
    ({"hidden_size": "32"}, "hidden_size", "'32'"),
    ({"intermediate_size": 0}, "intermediate_size", "0"),
    ({"num_hidden_layers": None}, "num_hidden_layers", "None"),
    ({"num_attention_heads": -4}, "num_attention_heads", "-4"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "3"),
    ({"head_dim": None}, "head_dim", "None"),
    ({"head_dim": 7}, "head_dim", "7"),
    ({"vocab_size": 0}, "vocab_size", "0"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "0"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps", "inf"),
    ({"output_multiplier": "x"}, "output_multiplier", "'x'"),
    ({"final_logit_softcapping": -20.0}, "final_logit_softcapping", "-20.0"),
    ({"input_embedding_scale": math.nan}, "input_embedding_scale", "nan"),
    ({"attention_bias": "no"}, "attention_bias", "'no'"),
    ({"is_causal": 0}, "is_causal", "0"),
    ({"use_sliding_window": "yes"}, "use_sliding_window", "'yes'"),
    ({"layer_types": [FULL]}, "layer_types", "['full_attention']"),
    ({"layer_types": [FULL, "linear_attention"]}, "layer_types", "linear_attention"),
    ({"layer_types": 2}, "layer_types", "2"),
    ({"layer_types": [SLIDING, FULL]}, "sliding_window", "None"),
    ({"layer_types": [SLIDING, FULL], "sliding_window": 0}, "sliding_window", "0"),
    ({"rope_theta": None}, "rope_theta", "None"),
    ({"rope_theta": math.nan}, "rope_theta", "nan"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta", "'1e4'"),
    ({"rope_scaling": [1]}, "rope_scaling", "[1]"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type", "'spiral'"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type", "['yarn']"),
    # Its frequencies move with the length, which cached keys cannot follow.
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type", "'dynamic'"),
    ({"rope_scaling": {"type": "yarn"}}, "factor", "None"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor", "'4'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor", "None"),
    ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "rope_parameters", "{'full_attention'"),
    ({"architectures": 3}, "architectures", "3"),
    # DFlash2 has all four of its keys or none, nested or not.
    ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size", "none"),
    (nested(conv_kernel_size=2), "conv_group_size", "none"),
    ({"selector_top_k": 16}, "conv_kernel_size", "none"),
    *((nested(**{**SECOND, key: None}), key, "none") for key in SECOND),
    *((nested(**{**SECOND, key: 0}), key, "0") for key in SECOND),
    (nested(**{**SECOND, "conv_kernel_size": 2.0}), "conv_kernel_size", "2.0"),
    (nested(**{**SECOND, "conv_group_size": 12}), "conv_group_size", "12"),
    ({"vocab_size": None, **nested(**SECOND)}, "vocab_size", "None"),
    (nested(**SECOND, draft_vocab_size=8), "draft_vocab_size", "8"),
    (nested(**SECOND, transition_rank=8), "transition_rank", "8"),
    ({"vocab_size": None, **nested(transition_rank=8)}, "vocab_size", "None"),
]


@pytest.mark.parametrize(("changes", "key", "got"), BROKEN, ids=str)
def test_a_key_missing_or_out_of_range_is_named_with_what_came(
    changes: dict[str, object], key: str, got: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    error = caught.value
    assert isinstance(error, UserError)
    assert error.argument.startswith("here/config.json: ")
    assert key in error.argument
    assert error.got.startswith(got) or got in error.got
    assert error.expected
    assert error.remedy in str(error)


# From the model cards: sizes, and what the published file holds.
PUBLISHED = {
    "Qwen3-8B-DFlash-b16": (
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        },
        58,
        None,
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": [SLIDING] * 5 + [FULL],
            "sliding_window": 4096,
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            },
        },
        69,
        385_906_176,
    ),
}


# Both of DFlash2: all layers slide.
_DFLASH2 = {
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_types": [SLIDING] * 5,
    "sliding_window": 2048,
    "is_causal": False,
    "architectures": ["DFlash2DraftModel"],
}
PUBLISHED |= {
    "Qwen3.8-27B-DFlash2": (
        {
            **_DFLASH2,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "vocab_size": 248320,
            "dflash_config": {
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                **SECOND,
            },
        },
        81,
        1_924_404_480,
    ),
    "Muse-Glimmer-30B-DFlash2": (
        {
            **_DFLASH2,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "vocab_size": 202048,
            "rope_theta": 5e5,
            "output_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20,
            "dflash_config": {
                "mask_token_id": 201818,
                "target_layer_ids": [1, 13, 25, 37, 49],
                **SECOND,
            },
        },
        81,
        2_772_159_744,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_network_has_the_tensors_of_the_published_checkpoints(name: str) -> None:
    changes, num_tensors, num_parameters = PUBLISHED[name]
    with torch.device("meta"):
        network = DFlashNetwork(parse(**changes))
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert shapes == drafter_shapes(drafter_config(**changes))
    assert len(shapes) == num_tensors
    if num_parameters is not None:
        assert sum(math.prod(shape) for shape in shapes.values()) == num_parameters
