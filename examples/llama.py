"""Llama on dtorch: transformers' own LlamaForCausalLM, unmodified: generating text and training.

    python examples/llama.py                           # greedy and sampled text from random weights
    python examples/llama.py --train                   # twenty AdamW steps on this repository's text, then the same
    python examples/llama.py --train --check           # tokens and losses equal to eager PyTorch's, to the last bit

The tokenizer is a byte-level BPE trained on this repository. The model lives on the last worker, so ``--workers 2``
shows that any worker will do.

Training asks for no value: all steps are issued, and the losses are read in the end. ``generate`` asks once per token:
it must know whether every sequence has met its end token (``unfinished_sequences.max() == 0`` in transformers'
``StopCheck``) before it goes on. It also asks four times in the beginning, to check its special tokens.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import _engine
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BATCH, CONTEXT = 4, 64


def repository_text() -> list[str]:
    """The documents and Python sources of this repository."""
    root = Path(__file__).resolve().parents[1]
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("dtorch/**/*.py"), *root.glob("examples/*.py")]
    return [file.read_text() for file in sorted(files)]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: it knows every byte, so it needs no token for the unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama on the CPU, with weights by seed."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        num_key_value_heads=max(1, args.width // 64),
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokens: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Run AdamW steps on random stretches of the text; returns the loss of each."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stretches = torch.Generator().manual_seed(args.seed)
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=stretches)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()]).to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu().tolist()  # the first wait


def generate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, sample: bool
) -> torch.Tensor:
    """Continue the prompt; returns the tokens, prompt included, on the CPU."""
    model.eval()
    prompt = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    torch.manual_seed(args.seed)  # seeds the CPU and every worker
    return model.generate(**prompt, max_new_tokens=args.tokens, do_sample=sample, use_cache=True)[0].cpu()


def run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: torch.Tensor, args: argparse.Namespace
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """All that the example does with one model on its device: (losses, greedy tokens, sampled tokens)."""
    losses = train(model, text, args) if args.train else []
    return losses, generate(model, tokenizer, args, sample=False), generate(model, tokenizer, args, sample=True)


def run_eager(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: torch.Tensor, args: argparse.Namespace
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """The same in eager PyTorch."""
    return run(model.to(args.device), tokenizer, text, args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _engine.add_arguments(parser)
    parser.add_argument("--prompt", default="A tensor on the client is")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens to generate")
    parser.add_argument("--width", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--train", action="store_true", help="train on this repository's text first")
    parser.add_argument("--steps", type=int, default=20, help="steps of --train")
    args = parser.parse_args()
    if args.width % 64:
        parser.error(f"--width must be a multiple of 64, not {args.width}")
    _engine.start(args)

    texts = repository_text()
    tokenizer = train_tokenizer(texts)
    text = torch.tensor(tokenizer(tokenizer.eos_token.join(texts)).input_ids)
    model = build_model(args, tokenizer)
    untouched = copy.deepcopy(model) if args.check else None
    model.to(_engine.device(args, args.workers - 1))
    print(f"{model.num_parameters() / 1e6:.2f} million parameters on {model.device}; {len(text)} tokens of text")

    losses, greedy, sampled = run(model, tokenizer, text, args)
    if losses:
        print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    print(f"greedy:  {tokenizer.decode(greedy)!r}")
    print(f"sampled: {tokenizer.decode(sampled)!r}")
    if not args.check:
        return 0

    eager_losses, eager_greedy, eager_sampled = _engine.eager(args, run_eager, untouched, tokenizer, text, args)
    allowed = _engine.tolerance(args)
    problems = [
        f"loss of step {step}: {a.hex()}, but eager PyTorch has {b.hex()}"
        for step, (a, b) in enumerate(zip(losses, eager_losses, strict=True))
        if a.hex() != b.hex() and abs(a - b) > allowed * abs(b)
    ]
    problems += [
        _engine.difference("greedy tokens", greedy, eager_greedy),
        _engine.difference("sampled tokens", sampled, eager_sampled),
    ]
    agreed = f"{len(losses)} losses, {len(greedy)} greedy and {len(sampled)} sampled tokens equal eager PyTorch's"
    return _engine.verdict(problems, agreed)


if __name__ == "__main__":
    sys.exit(main())
