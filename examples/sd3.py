"""Stable Diffusion 3 on dtorch: diffusers' own pipeline, unmodified, with its modules on several workers.

    python examples/sd3.py --workers 2 --prompt "a red fox in the snow"   # writes out/sd3.png
    python examples/sd3.py --workers 2 --check                            # bit by bit against eager PyTorch
    python examples/sd3.py --workers 2 --preset small --table             # time and memory against eager PyTorch
    python examples/sd3.py --workers 2 --preset small --trace out/sd3.json  # a timeline of all processes

The weights are random (there is no download), so the picture is noise with structure; the work is the real one.
With one worker everything is on dtorch:0. With two, the text encoders are on dtorch:1 and transformer and VAE on
dtorch:0. With more, T5 and then the second CLIP get a worker of their own, and the encoders run at the same time.

``--trace`` records a second picture, when everything is warm, for https://ui.perfetto.dev; ``benchmarks/plot_trace.py``
draws the file: the client is done with the picture long before the workers are.

The script waits nowhere until it asks for the picture. The pipeline's progress bar therefore counts the steps that
have been *issued*; a second one counts those whose latents have arrived.

What in the pipeline asks the device for a value:

* ``FlowMatchEulerDiscreteScheduler.index_for_timestep``, in the first step: ``nonzero()`` and ``.item()``. It searches
  for the position of the first timestep, unless the scheduler has been told: see `begin_at_zero`.
* ``VaeImageProcessor.postprocess`` for "pil" and "np". With ``output_type="pt"`` the picture remains a handle.

Nothing else does: prompts are tokenized and compared (``torch.equal``) on the CPU, the noise is drawn on the CPU from
the seed, iterating over ``timesteps`` makes views, and the loop branches on Python numbers only.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _engine
import torch
from _sd3_model import PRESETS, Preset, StableDiffusion3Pipeline, build_pipeline
from tqdm import tqdm

MIB = 1024 * 1024


@dataclass
class Picture:
    """A picture that has been issued. On dtorch the tensors are handles: nothing has been waited for."""

    image: torch.Tensor  # (1, 3, size, size), 0 to 1
    latents: torch.Tensor  # (1, 16, size / 8, size / 8), after the last step
    steps: list[Any] = field(default_factory=list)  # a TensorFuture per step, where asked for


class Studio:
    """A pipeline whose text half and image half may live on different devices.

    Both halves are pipelines of diffusers' class over the same components. The text half encodes prompts; the image
    half has no encoders and is given the embeddings.
    """

    def __init__(self, pipe: StableDiffusion3Pipeline, preset: Preset) -> None:
        parts = pipe.components
        text = {name: part for name, part in parts.items() if name.startswith(("text_encoder", "tokenizer"))}
        image = {name: parts[name] for name in ("transformer", "vae", "scheduler")}
        self.text = StableDiffusion3Pipeline(**text, **dict.fromkeys(image))
        self.image = StableDiffusion3Pipeline(**image, **dict.fromkeys(text))
        self.preset = preset
        self.encoders = [self.text.text_encoder, self.text.text_encoder_2, self.text.text_encoder_3]
        self.modules = [*self.encoders, self.image.transformer, self.image.vae]
        begin_at_zero(self.image)

    def place(self, args: argparse.Namespace) -> None:
        """Move the modules to the workers."""
        self.image.to(_engine.device(args, 0))
        workers = {1: (0, 0, 0), 2: (1, 1, 1), 3: (1, 1, 2)}.get(args.workers, (1, 2, 3))
        home = _engine.device(args, workers[0])
        for encoder, worker in zip(self.encoders, workers, strict=True):
            encoder.to(_engine.device(args, worker))
            if worker != workers[0]:
                keep_home(encoder, home)

    def to(self, device: str) -> None:
        """Move the modules to one device: eager PyTorch's."""
        for module in self.modules:
            module.to(device)

    def draw(self, args: argparse.Namespace, show: bool = False) -> Picture:
        """Issue a picture. Waits for nothing on dtorch; on eager PyTorch the picture is ready on return."""
        with torch.no_grad():
            encoded = self.text.encode_prompt(
                args.prompt,
                None,
                None,
                device=self.encoders[0].device,
                negative_prompt=args.negative_prompt,
                max_sequence_length=self.preset.t5_tokens,
            )
        prompt, negative, pooled, negative_pooled = (tensor.to(self.image.device) for tensor in encoded)
        futures: list[Any] = []
        latents: list[torch.Tensor] = []

        def after_step(pipe: Any, step: int, timestep: torch.Tensor, values: dict[str, torch.Tensor]) -> dict[str, Any]:
            latents[:] = [values["latents"]]
            if show and args.engine == "dtorch":
                futures.append(values["latents"].to_torch_async())  # type: ignore[attr-defined]
            return values

        self.image.set_progress_bar_config(desc="steps issued  ", disable=not show)
        image = self.image(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            pooled_prompt_embeds=pooled,
            negative_pooled_prompt_embeds=negative_pooled,
            height=args.size,
            width=args.size,
            num_inference_steps=args.steps,
            generator=torch.Generator().manual_seed(args.seed),  # on the CPU: the same noise on every engine
            output_type="pt",
            callback_on_step_end=after_step,
        ).images
        return Picture(image, latents[0], futures)


def begin_at_zero(pipe: StableDiffusion3Pipeline) -> None:
    """Tell the scheduler, by its own public method, that the loop begins at its first timestep.

    The pipeline never says so, and ``set_timesteps`` forgets it, so it is said before each call of the transformer.
    Without this the first step waits for the device once, and the picture is the same.
    """
    pipe.transformer.register_forward_pre_hook(lambda *_: pipe.scheduler.set_begin_index(0))


def keep_home(encoder: torch.nn.Module, home: torch.device) -> None:
    """Let the pipeline, which expects all encoders on one device, call one that is elsewhere.

    The pipeline itself brings the hidden states home, but not the pooled embedding of a CLIP encoder.
    """

    def move_pooled(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if "text_embeds" in output:
            output["text_embeds"] = output["text_embeds"].to(home)

    encoder.register_forward_pre_hook(lambda module, inputs: tuple(x.to(module.device) for x in inputs))
    encoder.register_forward_hook(move_pooled)


def wait(picture: Picture) -> torch.Tensor:
    """The picture's values, on the CPU; shows a progress bar of the steps as they arrive."""
    for future in tqdm(picture.steps, desc="steps computed", disable=not picture.steps):
        future.get()
    return picture.image.cpu()


def check(ours: Picture, eager: Picture, args: argparse.Namespace) -> int:
    """Compare the latents and the picture with eager PyTorch's: to the last bit, or within a GPU's tolerance."""
    pairs = (("latents", ours.latents, eager.latents), ("picture", ours.image, eager.image))
    allowed = _engine.tolerance(args)
    problems = [_engine.difference(name, a.cpu(), b.cpu(), allowed) for name, a, b in pairs]
    equal = f"equal to eager PyTorch's within {allowed:g}" if allowed else "bit-identical to eager PyTorch's"
    return _engine.verdict(problems, f"latents and picture are {equal}")


def measure(studio: Studio, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds until the Python code that builds the picture has returned, and until the picture is in hand."""
    begin = time.perf_counter()
    picture = studio.draw(args)
    client = time.perf_counter() - begin
    wait(picture)
    return client, time.perf_counter() - begin


def trace(studio: Studio, args: argparse.Namespace) -> None:
    """Record a picture from the first line of Python to its values."""
    import dtorch

    args.trace.parent.mkdir(parents=True, exist_ok=True)
    with dtorch.profile(args.trace):
        with torch.profiler.record_function("draw"):
            picture = studio.draw(args)
        wait(picture)
    print(f"trace: {args.trace}, to be opened in https://ui.perfetto.dev or drawn by benchmarks/plot_trace.py")


def table(ours: Studio, eager: Studio, args: argparse.Namespace) -> None:
    """Print times and memory of both engines, measured in alternating rounds. Eager PyTorch may use every core."""
    torch.set_num_threads(_engine.CORES)
    with _engine.LiveBytes(eager.modules) as meter:
        eager.draw(args)
    peaks = {"PyTorch": [meter.peak]}
    studios = {"PyTorch": eager}
    if args.engine == "dtorch":
        import dtorch

        for worker in range(args.workers):
            dtorch.reset_peak_memory_stats(worker)
        wait(ours.draw(args))
        peaks["dtorch"] = [dtorch.max_memory_allocated(worker) for worker in range(args.workers)]
        studios["dtorch"] = ours
    rounds = [{name: measure(studio, args) for name, studio in studios.items()} for _ in range(args.rounds)]

    print(
        f"\n{args.preset} preset, {args.size} x {args.size} pixels, {args.steps} steps; median of {args.rounds} rounds"
    )
    print(f"{'':16}{'client time':>14}{'end to end':>14}{'peak memory':>16}")
    for name in studios:
        client, total = (statistics.median(times[name][i] for times in rounds) for i in (0, 1))
        print(f"{name:16}{client:12.3f} s{total:12.3f} s{sum(peaks[name]) / MIB:12.1f} MiB")
    if args.engine == "dtorch":
        client, total = (
            statistics.median(times["dtorch"][i] / times["PyTorch"][i] for times in rounds) for i in (0, 1)
        )
        print(f"{'dtorch / PyTorch':16}{client:14.3f}{total:14.3f}{sum(peaks['dtorch']) / sum(peaks['PyTorch']):16.3f}")
        shares = ", ".join(f"dtorch:{worker} {peak / MIB:.1f} MiB" for worker, peak in enumerate(peaks["dtorch"]))
        print(f"PyTorch: {_engine.CORES} threads. dtorch: {args.workers} x {args.threads} threads; {shares}.")


def parse() -> argparse.Namespace:
    """Read the command line and fill the defaults that depend on the preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _engine.add_arguments(parser)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="medium: the sizes of SD3-medium")
    parser.add_argument("--prompt", default="a red fox in the snow, oil painting")
    parser.add_argument("--negative-prompt", default="blurry, low quality")
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--size", type=int, help="side of the picture in pixels, a multiple of 16")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("out/sd3.png"), help="default: out/sd3.png")
    parser.add_argument("--table", action="store_true", help="compare time and memory with eager PyTorch")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record a picture as a Chrome trace")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --table")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    args.steps = args.steps or preset.steps
    args.size = args.size or preset.size
    if args.size % 16 or not 16 <= args.size <= 8 * preset.latent_side:
        parser.error(f"--size must be a multiple of 16 up to {8 * preset.latent_side}, not {args.size}")
    if args.trace and args.engine != "dtorch":
        parser.error("--trace records dtorch's processes: it needs --engine dtorch")
    # A picture's stages follow each other, so with two workers one computes at a time and may have every core. With
    # more, the encoders share the cores.
    args.threads = args.threads or max(1, _engine.CORES // max(1, args.workers - 1))
    return args


def main() -> int:
    args = parse()
    _engine.start(args)
    preset = PRESETS[args.preset]
    begin = time.perf_counter()
    pipe = build_pipeline(preset, args.seed, getattr(torch, args.dtype))
    eager = Studio(copy.deepcopy(pipe), preset) if args.check or args.table else None
    if eager:
        eager.to(args.device)
    ours = Studio(pipe, preset)
    weights = sum(weight.numel() for module in ours.modules for weight in module.parameters())
    ours.place(args)
    print(f"{weights / 1e6:.1f} million parameters made and placed in {time.perf_counter() - begin:.1f} s")

    picture = ours.draw(args, show=True)
    image = wait(picture)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    processor = ours.image.image_processor
    processor.numpy_to_pil(processor.pt_to_numpy(image))[0].save(args.out)

    code = check(picture, eager.draw(args), args) if args.check and eager else 0
    if args.table and eager:
        table(ours, eager, args)
    if args.trace:
        trace(ours, args)
    print(f"picture: {args.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
