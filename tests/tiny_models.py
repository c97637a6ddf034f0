"""The models that people run, tiny: built by transformers', diffusers' and PyTorch's own classes from their configs.

Weights are random; nothing is downloaded. Each :class:`Model` says how it is built, what goes in, and how it generates,
if it does; ``test_models.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from same import Device
from torch import nn

#: Tokens of every language model here.
VOCABULARY = 96

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """How to use one model.

    ``build`` makes it on the CPU; ``inputs`` makes the arguments of a forward on a device; ``generate``, if there is
    any, goes from the model and a device to the tokens.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Device], Inputs]
    generate: Callable[[Any, Device], torch.Tensor] | None = None


def _tokens(on: Device, batch: int, length: int) -> torch.Tensor:
    """Random tokens; 0 to 2 are left out, since they are padding, beginning and end here."""
    return on.indices(VOCABULARY - 3, batch, length) + 3


def _text(on: Device) -> Inputs:
    """A batch whose second text is padded on the left, and what to learn from it."""
    tokens = _tokens(on, 2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": on.put(mask), "labels": tokens.clone()}


def _continue(model: Any, on: Device, **options: Any) -> torch.Tensor:
    """Two texts continued: greedily and, from a seed, sampled."""
    inputs = _text(on)
    del inputs["labels"]
    texts = []
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}):
        torch.manual_seed(11)
        texts.append(model.generate(**inputs, max_new_tokens=6, **how, **options))
    return torch.cat([nn.functional.pad(text, (0, 15 - text.shape[1])) for text in texts])


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **_SPECIAL,
}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=8))


def _gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**_DECODER, head_dim=8, sliding_window=4, layer_types=layers))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, **_SPECIAL)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**sizes))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        **_SPECIAL,
    )
    return T5ForConditionalGeneration(config)


_IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=_IMAGE, projection_dim=16))


def _image_and_text(on: Device) -> Inputs:
    tokens = torch.cat([_tokens(on, 2, 6), on.put([[2], [2]])], dim=1)
    return {"input_ids": tokens, "pixel_values": on(2, 3, 16, 16), "return_loss": True}


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_IMAGE, num_labels=5))


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_SPECIAL,
    )
    return WhisperForConditionalGeneration(config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, **_SPECIAL)
    return MambaForCausalLM(config)


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def _flux_inputs(on: Device) -> Inputs:
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return {
        "hidden_states": on(2, 16, 16),
        "encoder_hidden_states": on(2, 5, 16),
        "pooled_projections": on(2, 24),
        "timestep": on.put([0.25, 0.75]),
        "guidance": on.put([3.5, 3.5]),
        "img_ids": on.put(places),
        "txt_ids": on.put(torch.zeros(5, 3)),
    }


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def _autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    )


def _transcribe(model: Any, on: Device) -> torch.Tensor:
    return model.generate(input_features=on(2, 8, 32), max_new_tokens=6, do_sample=False)


#: Every model, by name.
MODELS: dict[str, Model] = {
    "llama": Model(_llama, _text, _continue),
    "qwen3": Model(_qwen3, _text, _continue),
    "gemma3": Model(_gemma3, _text, _continue),
    "mixtral": Model(_mixtral, lambda on: {**_text(on), "output_router_logits": True}, _continue),
    "gpt2": Model(_gpt2, _text, _continue),
    "bert": Model(_bert, _text),
    "t5": Model(_t5, _text, _continue),
    "clip": Model(_clip, _image_and_text),
    "vit": Model(_vit, lambda on: {"pixel_values": on(2, 3, 16, 16), "labels": on.put([1, 4])}),
    "whisper": Model(_whisper, lambda on: {"input_features": on(2, 8, 32), "labels": _tokens(on, 2, 7)}, _transcribe),
    "mamba": Model(_mamba, _text, _continue),
    "sd3": Model(
        _sd3,
        lambda on: {
            "hidden_states": on(2, 4, 8, 8),
            "encoder_hidden_states": on(2, 5, 16),
            "pooled_projections": on(2, 24),
            "timestep": on.put([10.0, 700.0]),
        },
    ),
    "flux": Model(_flux, _flux_inputs),
    "unet": Model(
        _unet,
        lambda on: {
            "sample": on(2, 4, 8, 8),
            "timestep": on.put([10, 700]),
            "encoder_hidden_states": on(2, 5, 16),
        },
    ),
    "autoencoder": Model(_autoencoder, lambda on: {"sample": on(2, 3, 16, 16), "sample_posterior": True}),
    "lstm": Model(
        lambda: nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2),
        lambda on: {"input": on(3, 5, 8), "hx": (on(4, 3, 12), on(4, 3, 12))},
    ),
    "gru": Model(lambda: nn.GRU(8, 12, num_layers=2, dropout=0.2), lambda on: {"input": on(5, 3, 8)}),
    "transformer": Model(
        lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
        lambda on: {
            "src": on(2, 6, 16),
            "tgt": on(2, 5, 16),
            "tgt_mask": on.put(nn.Transformer.generate_square_subsequent_mask(5)),
            "src_key_padding_mask": on.put([[False] * 6, [False] * 4 + [True] * 2]),
        },
    ),
    "attention": Model(
        lambda: nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True, kdim=12, vdim=10),
        lambda on: {"query": on(2, 5, 16), "key": on(2, 7, 12), "value": on(2, 7, 10)},
    ),
}
