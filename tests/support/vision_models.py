"""Tiny random models that read pictures, as folders, pictures for them, and what transformers answers. Runs
no engine."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers

from localmoe.core.types import Image, Message
from support.multimodal_models import MULTIMODAL
from support.tiny_models import randomised, tiny_config
from support.tokenizer import VOCAB_SIZE, write_tokenizer

IMAGE_TOKEN = "<image>"
_GIVEN = ("pixel_values", "image_grid_thw", "image_position_ids")
IMAGE_TOKEN_ID = VOCAB_SIZE - 1
BEFORE_ID, BEHIND_ID = VOCAB_SIZE - 2, VOCAB_SIZE - 3  # around a picture of gemma4
READING_ARCHITECTURES = ("qwen3_5_moe", "qwen3_vl_moe", "gemma4")
BY_GRID = READING_ARCHITECTURES[:2]
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '[<image>]' }}{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_EYES = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
    "num_position_embeddings": 16,
}  # fmt: skip
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 16_777_216, "shortest_edge": 4096}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


_POOLING = {
    "image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "pooling_kernel_size": 3,
    "max_soft_tokens": 70, "do_normalize": False, "do_rescale": True, "rescale_factor": 1 / 255,
}  # fmt: skip


def vision_model(architecture: str, *, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """transformers' own model with random weights. text: changes of its text part's config."""
    kind, special, eyes = MULTIMODAL.get(architecture, ("qwen3_5_moe_text", dict[str, Any](), _EYES))
    around: dict[str, int] = {}
    if architecture == "gemma4":
        eyes = {**eyes, "patch_size": 16, "pooling_kernel_size": 3}
        special = {**special, "use_bidirectional_attention": "vision"}
        around = {"boi_token_id": BEFORE_ID, "eoi_token_id": BEHIND_ID}
    else:
        eyes = {**eyes, "num_position_embeddings": 16}
    of_text = tiny_config(kind, **{**special, "max_position_embeddings": 1024, **text}).to_dict()
    config = transformers.AutoConfig.for_model(
        architecture, text_config=of_text, vision_config=eyes, image_token_id=IMAGE_TOKEN_ID, **around
    )
    torch.manual_seed(0)
    return randomised(transformers.AutoModelForImageTextToText.from_config(config).eval(), dtype)


def write_vision_model(folder: Path, model: Any) -> Path:
    """A complete model folder."""
    model.save_pretrained(folder)
    write_tokenizer(folder, chat_template=TEMPLATE, more_special=(IMAGE_TOKEN,))
    if model.config.model_type == "gemma4":
        settings = {"processor_class": "Gemma4Processor", "image_processor": _POOLING}
        (folder / "processor_config.json").write_text(json.dumps(settings))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return folder


def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    """A PNG of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    PIL.Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def shown(text: str, *images: tuple[int, bytes]) -> Message:
    """What a user says, with pictures at places of it."""
    return Message("user", text, images=tuple(Image(data, at) for at, data in images))


def reference_answer(
    model: Any, folder: Path, prompt: Sequence[int], pictures: Sequence[bytes], num_tokens: int
) -> list[int]:
    """What transformers' own greedy `generate` adds to a prompt whose pictures have their tokens already."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
    made = processor(images=images, return_tensors="pt")
    given = {name: made[name] for name in _GIVEN if name in made}
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
            mm_token_type_ids=(ids == IMAGE_TOKEN_ID).int(), **given,
        )  # fmt: skip
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
