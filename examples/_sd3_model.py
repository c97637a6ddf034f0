"""A complete Stable Diffusion 3 without a download: real classes, real tokenizers, random weights by seed.

Everything is diffusers' and transformers' own. The three presets differ in sizes only; ``medium`` has the sizes of
stabilityai/stable-diffusion-3-medium (4.7 billion parameters in T5, 2 billion in the transformer).
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()  # diffusers imports image processors that warn about a missing torchvision

from diffusers import (  # noqa: E402
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

#: The tokenizers' vocabularies come from these.
CAPTIONS = (
    "a photograph of an astronaut riding a horse on the moon",
    "a red fox in the snow, oil painting, highly detailed",
    "a watercolor of a small house by the sea at sunset",
    "portrait of an old sailor with a white beard, soft light",
    "a city street at night in the rain, neon lights, cinematic",
    "a cat holding a sign that says hello world",
    "macro photo of a dewdrop on a green leaf, shallow depth of field",
    "an isometric drawing of a tiny workshop full of machines",
    "a mountain lake under a starry sky, long exposure",
    "a bowl of fruit on a wooden table, in the style of an old master",
    "blurry, low quality, distorted, watermark, text, bad anatomy",
)


@dataclass(frozen=True)
class Preset:
    """Sizes of one Stable Diffusion 3. A text encoder is (width, layers, heads)."""

    clip_l: tuple[int, int, int]
    clip_g: tuple[int, int, int]
    t5: tuple[int, int, int]
    t5_inner: int  # width of T5's feed-forward layers
    transformer: tuple[int, int]  # layers, heads of 64
    vae: tuple[int, ...]  # channels per level; each level but the first halves the picture
    vae_layers: int
    latent_side: int  # side of the largest picture, in latents of 8 x 8 pixels
    clip_vocabulary: int
    t5_vocabulary: int
    t5_tokens: int  # length that a prompt is padded to
    size: int  # default side of the picture in pixels
    steps: int  # default number of denoising steps


PRESETS = {
    "tiny": Preset(
        clip_l=(64, 2, 2),
        clip_g=(64, 2, 2),
        t5=(128, 2, 2),
        t5_inner=128,
        transformer=(2, 2),
        vae=(16, 16, 32, 32),
        vae_layers=1,
        latent_side=16,
        clip_vocabulary=1024,
        t5_vocabulary=512,
        t5_tokens=32,
        size=64,
        steps=4,
    ),
    "small": Preset(
        clip_l=(256, 6, 4),
        clip_g=(320, 8, 5),
        t5=(768, 8, 12),
        t5_inner=2048,
        transformer=(8, 8),
        vae=(32, 64, 128, 128),
        vae_layers=2,
        latent_side=64,
        clip_vocabulary=1024,
        t5_vocabulary=512,
        t5_tokens=64,
        size=256,
        steps=12,
    ),
    "medium": Preset(
        clip_l=(768, 12, 12),
        clip_g=(1280, 32, 20),
        t5=(4096, 24, 64),
        t5_inner=10240,
        transformer=(24, 24),
        vae=(128, 256, 512, 512),
        vae_layers=2,
        latent_side=128,
        clip_vocabulary=49408,
        t5_vocabulary=32128,
        t5_tokens=256,
        size=1024,
        steps=28,
    ),
}


# The tokenizers are made by hand, not by the trainers of the tokenizers library: those break ties by the order of a
# randomized hash table, and the same seed would give another picture every time.

WORDS = Counter(re.findall("[a-z]+", " ".join(CAPTIONS)))


def learn_merges(words: Counter[str]) -> list[tuple[str, str]]:
    """Byte-pair encoding: merge the most frequent pair of neighbours, until every word is one token."""
    spellings = {word: [*word[:-1], f"{word[-1]}</w>"] for word in words}
    merges = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, spelling in spellings.items():
            for pair in itertools.pairwise(spelling):
                pairs[pair] += words[word]
        if not pairs:
            return merges
        best = max(sorted(pairs), key=pairs.__getitem__)
        merges.append(best)
        for spelling in spellings.values():
            for i in range(len(spelling) - 1, 0, -1):
                if tuple(spelling[i - 1 : i + 1]) == best:
                    spelling[i - 1 : i + 1] = ["".join(best)]


def clip_tokenizer(pad: str) -> CLIPTokenizer:
    """A CLIP tokenizer with a vocabulary laid out as CLIP's own: bytes, ends of words, merges, two markers."""
    merges = learn_merges(WORDS)
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *("".join(pair) for pair in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, pad_token=pad, model_max_length=77)


def t5_tokenizer() -> T5TokenizerFast:
    """A T5 tokenizer whose pieces are the words of the captions, scored by frequency, and single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", math.log(count / WORDS.total())) for word, count in sorted(WORDS.items())]
    pieces += [(character, -10.0) for character in string.printable.split(" ")[0]]
    return T5TokenizerFast(vocab=pieces, extra_ids=0)


def clip_encoder(
    size: tuple[int, int, int], activation: str, vocabulary: int, tokenizer: CLIPTokenizer
) -> CLIPTextModelWithProjection:
    """A CLIP text encoder of (width, layers, heads) that fits the tokenizer."""
    width, layers, heads = size
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            projection_dim=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=77,
            hidden_act=activation,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_modules(preset: Preset) -> dict[str, Any]:
    """The nine components of the pipeline, weights drawn from the default generator of torch."""
    tokenizer, tokenizer_2 = clip_tokenizer(pad="<|endoftext|>"), clip_tokenizer(pad="!")
    t5_width, t5_layers, t5_heads = preset.t5
    layers, heads = preset.transformer
    clip_width = preset.clip_l[0] + preset.clip_g[0]
    return {
        "tokenizer": tokenizer,
        "text_encoder": clip_encoder(preset.clip_l, "quick_gelu", preset.clip_vocabulary, tokenizer),
        "tokenizer_2": tokenizer_2,
        "text_encoder_2": clip_encoder(preset.clip_g, "gelu", preset.clip_vocabulary, tokenizer_2),
        "tokenizer_3": t5_tokenizer(),
        "text_encoder_3": T5EncoderModel(
            T5Config(
                vocab_size=preset.t5_vocabulary,
                d_model=t5_width,
                d_kv=64,
                d_ff=preset.t5_inner,
                num_layers=t5_layers,
                num_heads=t5_heads,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
            )
        ),
        "transformer": SD3Transformer2DModel(
            sample_size=preset.latent_side,
            patch_size=2,
            in_channels=16,
            num_layers=layers,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=t5_width,
            caption_projection_dim=64 * heads,
            pooled_projection_dim=clip_width,
            out_channels=16,
            pos_embed_max_size=preset.latent_side * 3 // 2,
        ),
        "vae": AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(preset.vae),
            up_block_types=("UpDecoderBlock2D",) * len(preset.vae),
            block_out_channels=preset.vae,
            layers_per_block=preset.vae_layers,
            latent_channels=16,
            norm_num_groups=min(32, preset.vae[0]),
            sample_size=8 * preset.latent_side,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
    }


def build_pipeline(preset: Preset, seed: int, dtype: torch.dtype = torch.float32) -> StableDiffusion3Pipeline:
    """Build the pipeline on the CPU; the same seed gives the same weights."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        modules = build_modules(preset)
    finally:
        torch.set_default_dtype(before)
    for module in modules.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False)
    return StableDiffusion3Pipeline(**modules)
