"""Models of transformers on a remote device give the numbers of this machine's CPU.

Each is tiny, with random weights and dropout as its configuration has it: outputs, gradients, and weights and buffers
after a step of AdamW are compared, and what `generate` returns: greedy, sampled, with beams, with either kind of cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # what transformers says about its own models
]

TOLERANCE = 1e-4
"""Of outputs, gradients and weights, relative to the largest number of a tensor. Tokens are equal."""
ROUNDING = 1e-6
"""The same for tensors that are zero but for rounding: relative to the largest number of all outputs or gradients, and
to 1 for others."""
RATE, EPSILON = 1e-2, 1e-3
"""Of AdamW. A difference of a gradient makes one of its weight that is RATE / EPSILON times as large, at most. The
default epsilon would make steps of the same length out of gradients that are zero but for rounding."""

Config = dict[str, Any]
Inputs = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    name: str
    """Its class in transformers."""
    config: Config
    inputs: Inputs
    ways: tuple[str, ...] = ()
    """How it generates: keys of GENERATION."""


def numbers(*shape: int, seed: int = 7) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def tokens(length: int = 8) -> Any:
    """Tokens of two texts, without the special ones."""
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(7))


def text() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens()}


def padded_text() -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2]), "labels": tokens()}


def plain_text() -> dict[str, Any]:
    return {"input_ids": tokens()}


def two_texts() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(6)}


def images() -> dict[str, Any]:
    return {"pixel_values": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 3])}


def plain_images() -> dict[str, Any]:
    return {"pixel_values": numbers(2, 3, 32, 32)}


def large_images() -> dict[str, Any]:
    return {"pixel_values": numbers(2, 3, 64, 64)}


def segmented_images() -> dict[str, Any]:
    return {"pixel_values": numbers(2, 3, 32, 32), "labels": tokens(1024).view(2, 32, 32) % 5}


def captioned_images() -> dict[str, Any]:
    return {"pixel_values": numbers(2, 3, 32, 32), "input_ids": tokens()}


def image_in_text() -> dict[str, Any]:
    """One token stands for each patch of the image."""
    words = torch.cat([torch.full((2, 16), 63), tokens().clamp(max=62)], 1)
    return {"pixel_values": numbers(2, 3, 32, 32), "input_ids": words, "labels": words}


def waves() -> dict[str, Any]:
    return {"input_values": numbers(2, 400), "labels": tokens(4)}


def spectrograms() -> dict[str, Any]:
    return {"input_features": numbers(2, 8, 20), "labels": tokens(6)}


def series() -> dict[str, Any]:
    past, future = numbers(2, 10, 3), numbers(2, 4, 3, seed=8)
    return {
        "past_values": past[..., 0],
        "past_time_features": past[..., 1:],
        "past_observed_mask": torch.ones(2, 10),
        "future_values": future[..., 0],
        "future_time_features": future[..., 1:],
    }


def channels() -> dict[str, Any]:
    return {"past_values": numbers(2, 16, 2), "future_values": numbers(2, 4, 2, seed=8)}


SPECIAL: Config = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: Config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT: Config = {**SPECIAL, **SIZES, "max_position_embeddings": 32}
GROUPED: Config = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MIXTURE: Config = {**GROUPED, **EXPERTS, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
HEADS: Config = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
TRANSLATOR: Config = {
    **SPECIAL,
    **HEADS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_start_token_id": 1,
}
TRANSLATOR |= {"max_position_embeddings": 32, "forced_eos_token_id": None}
T5: Config = {
    **SPECIAL,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
IMAGE: Config = {**SIZES, "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 5}
PYRAMID: Config = {
    **IMAGE,
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "num_attention_heads": [1, 2],
}
PYRAMID |= {"patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
STAGES: Config = {"num_labels": 5, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}
WINDOWS: Config = {
    "num_labels": 5,
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1],
    "window_size": 4,
}
WINDOWS |= {"num_heads": [2, 4]}
PAIR: Config = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}
DETECTOR: Config = {**TRANSLATOR, "num_queries": 4, "num_labels": 5, "use_timm_backbone": False, "backbone": None}
BACKBONE: Config = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
DETECTOR |= {"backbone_config": {**BACKBONE, "layer_type": "basic", "out_features": ["stage2"]}}
SPEECH: Config = {**SPECIAL, **SIZES, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_length": 2}
LISTENER: Config = {**TRANSLATOR, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
LISTENER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
VOICE: Config = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24}
VOICE |= {"flow_size": 16, "spectrogram_bins": 9, "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2}
VOICE |= {"posterior_encoder_num_wavenet_layers": 2, "upsample_initial_channel": 16, "upsample_rates": [4, 2]}
VOICE |= {"upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
VOICE |= {"duration_predictor_filter_channels": 16, "duration_predictor_num_flows": 2}
FORECAST: Config = {**HEADS, "d_model": 16, "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]}
FORECAST |= {"num_time_features": 2, "encoder_layers": 2, "decoder_layers": 2, "num_parallel_samples": 3}
PATCHES: Config = {"context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "d_model": 16}
PATCHES |= {"num_input_channels": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "num_layers": 2}

LATENT: Config = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
RECURRENT: Config = {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}
SWITCH: Config = {
    "num_experts": 4,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
}
RELATIVE: Config = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
MOBILE: Config = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32]}
EFFICIENT: Config = {
    "in_channels": [32, 16],
    "out_channels": [16, 16],
    "kernel_sizes": [3, 3],
    "strides": [1, 2],
    "hidden_dim": 1280,
}
EFFICIENT |= {"num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": []}
EFFICIENT |= {"width_coefficient": 1.0, "depth_coefficient": 1.0}
DENSE: Config = {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 8, 8],
    "fusion_hidden_size": 8,
}
RESTORED: Config = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
TALKER: Config = {
    "text_config": {**GROUPED, "model_type": "llama"},
    "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
}
TALKER |= {"image_token_id": 63, "vision_feature_layer": -1}

GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"cache_implementation": "dynamic"},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static"},
}
ALL = tuple(GENERATION)


def causal(name: str, config: Config, **more: Any) -> Architecture:
    return Architecture(name, {**config, **more}, text, ALL)


def translator(name: str, config: Config, **more: Any) -> Architecture:
    return Architecture(name, {**config, **more}, two_texts, ALL)


ZOO = [
    # Text that goes on.
    causal("LlamaForCausalLM", GROUPED),
    causal("GPT2LMHeadModel", TEXT),
    causal("GPTNeoForCausalLM", TEXT, attention_types=[[["global", "local"], 1]], num_layers=2),
    causal("GPTNeoXForCausalLM", TEXT),
    causal("OPTForCausalLM", TEXT, ffn_dim=48, word_embed_proj_dim=32),
    causal("BloomForCausalLM", TEXT),
    causal("MistralForCausalLM", GROUPED),
    causal("Qwen3ForCausalLM", GROUPED),
    causal("Gemma3ForCausalLM", GROUPED),
    causal("Phi3ForCausalLM", GROUPED),
    causal("FalconForCausalLM", TEXT),
    causal("CohereForCausalLM", GROUPED),
    causal("Olmo2ForCausalLM", GROUPED),
    # Mixtures of experts.
    causal("MixtralForCausalLM", MIXTURE),
    causal("Qwen3MoeForCausalLM", MIXTURE),
    causal("GptOssForCausalLM", MIXTURE),
    causal("DeepseekV3ForCausalLM", MIXTURE, **LATENT),
    # Recurrent ones.
    causal("MambaForCausalLM", TEXT, state_size=4, time_step_rank=4),
    causal("Mamba2ForCausalLM", TEXT, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=4),
    causal("RecurrentGemmaForCausalLM", GROUPED, num_key_value_heads=1, **RECURRENT),
    causal("RwkvForCausalLM", TEXT, attention_hidden_size=32),
    # Text of text.
    translator("T5ForConditionalGeneration", T5),
    translator("SwitchTransformersForConditionalGeneration", T5, **SWITCH),
    translator("BartForConditionalGeneration", TRANSLATOR),
    translator("MarianMTModel", TRANSLATOR, decoder_vocab_size=64),
    translator("LEDForConditionalGeneration", TRANSLATOR, attention_window=4),
    # Text that is read.
    Architecture("BertForMaskedLM", TEXT, padded_text),
    Architecture("RobertaForMaskedLM", TEXT, padded_text),
    Architecture("AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, padded_text),
    Architecture("ElectraForMaskedLM", {**TEXT, "embedding_size": 16}, padded_text),
    Architecture("DistilBertForMaskedLM", {**TEXT, "dim": 32, "n_heads": 4, "n_layers": 2}, padded_text),
    Architecture("DebertaV2ForMaskedLM", {**TEXT, **RELATIVE}, padded_text),
    Architecture("ModernBertForMaskedLM", {**TEXT, "local_attention": 4, "global_attn_every_n_layers": 2}, padded_text),
    Architecture("LongformerForMaskedLM", {**TEXT, "attention_window": 4}, padded_text),
    Architecture("XLNetForSequenceClassification", {**SPECIAL, "d_model": 32, "n_head": 4, "n_layer": 2}, plain_text),
    Architecture("FNetForMaskedLM", TEXT, plain_text),
    # Images.
    Architecture("ViTForImageClassification", IMAGE, images),
    Architecture("ResNetForImageClassification", {**STAGES, "layer_type": "basic"}, images),
    Architecture("DeiTForImageClassification", IMAGE, images),
    Architecture("BeitForImageClassification", IMAGE, images),
    Architecture("Dinov2ForImageClassification", IMAGE, images),
    Architecture("SwinForImageClassification", WINDOWS, images),
    Architecture("ConvNextForImageClassification", {**STAGES, "num_stages": 2}, images),
    Architecture("RegNetForImageClassification", STAGES, images),
    Architecture("MobileNetV2ForImageClassification", {**IMAGE, "depth_multiplier": 0.25}, images),
    Architecture("MobileViTForImageClassification", {**IMAGE, **MOBILE, "patch_size": 2}, images),
    Architecture("EfficientNetForImageClassification", {**IMAGE, **EFFICIENT}, images),
    Architecture("SegformerForSemanticSegmentation", {**PYRAMID, "decoder_hidden_size": 16}, segmented_images),
    Architecture("DPTForSemanticSegmentation", {**IMAGE, **DENSE}, plain_images),
    Architecture("DetrForObjectDetection", DETECTOR, large_images),
    Architecture("DeformableDetrForObjectDetection", {**DETECTOR, "num_feature_levels": 1}, large_images),
    Architecture("ViTMAEForPreTraining", {**IMAGE, **RESTORED}, plain_images),
    # Images with text.
    Architecture("CLIPModel", PAIR, lambda: {**captioned_images(), "return_loss": True}),
    Architecture("SiglipModel", PAIR, lambda: {**captioned_images(), "return_loss": True}),
    Architecture("LlavaForConditionalGeneration", TALKER, image_in_text, ALL),
    # Sound.
    Architecture("WhisperForConditionalGeneration", LISTENER, spectrograms, ALL),
    Architecture("Wav2Vec2ForCTC", SPEECH, waves),
    Architecture("HubertForCTC", SPEECH, waves),
    Architecture("VitsModel", VOICE, lambda: {"input_ids": tokens(6)}),
    # Series of numbers.
    Architecture("TimeSeriesTransformerForPrediction", FORECAST, series, ("samples",)),
    Architecture("InformerForPrediction", FORECAST, series, ("samples",)),
    Architecture("AutoformerForPrediction", {**FORECAST, "label_length": 2}, series, ("samples",)),
    Architecture("PatchTSTForPrediction", PATCHES, channels),
    Architecture("PatchTSMixerForPrediction", PATCHES, channels),
]

DRAWN_HERE = {
    "Wav2Vec2ForCTC": "which layers are dropped: `torch.rand([])`",
    "HubertForCTC": "which layers are dropped: `torch.rand([])`",
    "VitsModel": "noise for the durations: `torch.randn(…).to(device)`",
    "TimeSeriesTransformerForPrediction": "which layers are dropped: `torch.rand([])`",
    "InformerForPrediction": "which layers are dropped, and which keys are looked at: `torch.randint(…)`",
    "AutoformerForPrediction": "which layers are dropped: `torch.rand([])`",
}
"""Models that draw some random numbers on the CPU wherever they are, and the others on their device.

On the CPU both come from one generator, and on any other device (also on a GPU) from two: with the same seed the
numbers differ. Here the first kind have a generator of their own in both runs.
"""
ALTERED: dict[str, Config] = {}
"""Models that are equal only with other settings than their own."""
REFUSED = {
    ("RwkvForCausalLM", "beams"): "cannot use beam search with a cache",
}
"""What transformers itself refuses, on the CPU too."""
DEFAULT_TIER = ("LlamaForCausalLM", "BertForMaskedLM", "ResNetForImageClassification")
"""The others are in the slow tier, or in the soak."""
ALIKE = (
    *("GPTNeoXForCausalLM", "OPTForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"),
    *("FalconForCausalLM", "CohereForCausalLM", "Olmo2ForCausalLM", "Qwen3MoeForCausalLM", "MarianMTModel"),
    *("RobertaForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM", "DistilBertForMaskedLM"),
    *("DeiTForImageClassification", "BeitForImageClassification", "Dinov2ForImageClassification"),
    *("RegNetForImageClassification", "SiglipModel", "HubertForCTC", "InformerForPrediction"),
)
"""Those of which another one has nearly all operators: they are in the soak."""


class DrawnHere(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Random numbers that are drawn without a device come from another generator than the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.rand, torch.randn, torch.randint) and kwargs.get("device") is None:
            kwargs["generator"] = self.generator
        return function(*args, **kwargs)


def seed(number: int) -> None:
    for generator in (torch.manual_seed, random.seed, pytest.importorskip("numpy").random.seed):
        generator(number)


def tensors_in(outputs: Any) -> list[Any]:
    """Those of a model's outputs."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(dict(outputs)) if isinstance(leaf, torch.Tensor)]


def program(architecture: Architecture, device: Any) -> dict[str, Any]:
    """What is computed, by name: tensors of this machine, or what transformers says if it refuses to generate."""
    seed(0)
    transformers = pytest.importorskip("transformers")  # seconds: not before a test needs it
    kind = getattr(transformers, architecture.name)
    spread = {"initializer_range": 0.1}  # so that outputs are large enough to differ
    config = kind.config_class(**{**spread, **architecture.config, **ALTERED.get(architecture.name, {})})
    model = kind(config).train().to(device)
    inputs = {
        key: value.to(device) if torch.is_tensor(value) else value for key, value in architecture.inputs().items()
    }
    with DrawnHere() if architecture.name in DRAWN_HERE else contextlib.nullcontext():
        seed(1)
        found = step(model, inputs)
        inputs.pop("labels", None)
        for way in architecture.ways:
            seed(2)
            found[way] = generated(model.eval(), way, inputs)
    return {name: sky.fetch(value) if torch.is_tensor(value) else value for name, value in found.items()}


def step(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """A step of training: outputs, gradients, and weights and buffers after it."""
    outputs = model(**inputs)
    found = {f"output {at}": tensor for at, tensor in enumerate(tensors_in(outputs))}
    loss = outputs.get("loss")
    if loss is None:  # of models that have none without more inputs
        loss = sum(tensor.square().mean() for tensor in found.values() if tensor.requires_grad)
    loss.backward()
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON).step()
    found.update(model.named_parameters())
    found.update(model.named_buffers())
    return found


def generated(model: Any, way: str, inputs: dict[str, Any]) -> Any:
    if way == "samples":
        return model.generate(**{key: value for key, value in inputs.items() if key != "future_values"}).sequences
    try:
        return model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, **GENERATION[way])
    except ValueError as error:
        return str(error)


def tolerances(found: dict[str, Any]) -> dict[str, float]:
    """How much each tensor may differ, by its name."""
    largest: dict[str, float] = {}
    for name, tensor in found.items():
        kind = name.partition(" ")[0]
        largest[kind] = max(size(tensor), largest.get(kind, 0.0))

    def tolerance(name: str) -> float:
        kind = name.partition(" ")[0]
        smallest = ROUNDING * (largest[kind] if kind in ("output", "gradient") else 1.0)
        if (gradient := f"gradient of {name}") in found:
            smallest = max(smallest, RATE / EPSILON * tolerance(gradient))
        return max(TOLERANCE * size(found[name]), smallest)

    return {name: tolerance(name) for name in found}


def size(tensor: Any) -> float:
    """The largest of its numbers, without those that stand for infinity."""
    found = tensor.double().abs()
    found = found[found < 1e30]
    return found.max().item() if found.numel() else 0.0


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(
            architecture,
            id=architecture.name,
            marks=[pytest.mark.slow] * (architecture.name not in DEFAULT_TIER)
            + [pytest.mark.soak] * (architecture.name in ALIKE),
        )
        for architecture in ZOO
    ],
)
def test_a_model_is_the_same_on_a_device(device: Any, architecture: Architecture) -> None:
    here, there = program(architecture, "cpu"), program(architecture, device)
    assert here.keys() == there.keys()
    found = {name: value.result() for name, value in here.items() if isinstance(value, Future)}
    allowed = tolerances(found)
    for name, value in here.items():
        if name not in found:
            assert there[name] == value, name
            assert value is None or REFUSED[architecture.name, name] in value
            continue
        same, theirs = torch.testing.assert_close, there[name].result()
        same(theirs, found[name], rtol=0, atol=allowed[name], msg=lambda text, name=name: f"{name}: {text}")


def test_the_zoo_is_large() -> None:
    names = [architecture.name for architecture in ZOO]
    assert len(set(names)) == len(names) >= 52
    assert (
        sum(architecture.inputs in (images, plain_images, segmented_images, large_images) for architecture in ZOO) >= 12
    )
    assert {*DRAWN_HERE, *ALTERED, *DEFAULT_TIER, *ALIKE, *(name for name, _ in REFUSED)} <= set(names)
