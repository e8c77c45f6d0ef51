"""The embedded demo model: plain transformers loads it, it fits its size, talks sense and routes evenly.

Also holds the data tools to their promises. Says nothing of the engine that runs the model.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "assets" / "demo-moe"
MAX_BYTES = 32_000_000
SAMPLE = (
    "Once upon a time, there was a little fox who lived in the forest. One day he met a bear and they "
    "shared some apples. The king of that country had three sons, and the youngest was called Jack. Have you "
    "seen the new movie? Yes, I liked the music most of all. What is 12 + 30? Tom has 4 apples and buys 5 "
    "more. How many apples are there? def add(a, b):\n    return a + b\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The demo tokenizer as AutoTokenizer finds it."""
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The demo model as AutoModelForCausalLM finds it, in float32."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tools() -> Iterator[ModuleType]:
    """The data tools that need no GPU, imported as the script imports them."""
    sys.path.insert(0, str(ROOT / "tools"))
    import demo_data

    yield demo_data
    sys.path.remove(str(ROOT / "tools"))


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *lines: str, tokens: int = 40) -> str:
    """The greedy answer to the last of the user's lines, the earlier ones answered before it."""
    messages: list[dict[str, str]] = []
    said = ""
    for line in lines:
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(
            **prompt, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        said = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    return said


def test_the_folder_with_its_draft_stays_under_32_megabytes() -> None:
    assert sum(f.stat().st_size for f in DEMO.rglob("*") if f.is_file()) <= MAX_BYTES


def test_it_is_a_bf16_qwen2_moe_of_aligned_sizes() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["Qwen2MoeForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["num_hidden_layers"] >= 6
    assert config["num_experts"] >= 16
    assert config["num_experts_per_tok"] == 4
    for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        assert config[name] % 128 == 0, name


def test_turns_end_with_the_end_token_of_the_chat_format(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") in model.generation_config.eos_token_id


@pytest.mark.parametrize(
    "text", ["Hello, world!", "3 + 4 = 7", "Ünïcödé 😀 中文", "  two  spaces\n\tand a tab"]
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_it_greets_and_says_who_it_is(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert answer(model, tokenizer, "hello").startswith(("Hello", "Hi"))
    assert "localmoe demo" in answer(model, tokenizer, "hello", "who are you")


def test_it_tells_a_story_about_what_was_asked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    story = answer(model, tokenizer, "tell me a story about a fox", tokens=300)
    assert "fox" in story
    assert len(story) > 200
    assert story.endswith((".", "!", '"'))


@pytest.mark.parametrize(
    ("question", "value"),
    [("what is 3 + 4", "7"), ("What is 9 - 5?", "4"), ("8+6", "14"), ("what is two plus two?", "four")],
)
def test_it_does_small_sums(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, value: str
) -> None:
    assert answer(model, tokenizer, question).rstrip(".").split()[-1] == value


def test_it_remembers_a_name_over_other_turns(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = ("Hi, my name is Robert", "what is 2 + 2?", "what is my name?")
    assert "Robert" in answer(model, tokenizer, *lines)


@torch.no_grad()
def test_every_expert_of_every_layer_is_used(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    model(tokenizer(SAMPLE * 3, return_tensors="pt")["input_ids"])
    for hook in hooks:
        hook.remove()
    assert len(chosen) == model.config.num_hidden_layers
    for layer, indices in enumerate(chosen):
        shares = torch.bincount(indices.flatten(), minlength=16) / indices.numel()
        entropy = float(torch.special.entr(shares).sum() / torch.log(torch.tensor(16.0)))
        assert shares.min() > 0, layer
        assert entropy > 0.9, (layer, entropy)


def test_the_dense_experts_of_training_equal_the_eager_ones(tools: ModuleType) -> None:
    import demo_model

    trained = demo_model.build_model(1, "cpu").eval()
    tokens = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        dense = trained(tokens).logits
        trained.set_experts_implementation("eager")
        eager = trained(tokens).logits
    assert torch.allclose(dense, eager, atol=1e-5)


def test_held_out_documents_are_never_trained_on(tools: ModuleType) -> None:
    documents = [f"document {i}" for i in range(100)]
    train, held = tools.split_source(list(documents))
    assert len(held) == 3
    assert sorted(train + held) == sorted(documents)
    assert tools.split_source(list(documents))[1] == held
    line = "The quick brown fox jumps over the lazy dog and runs away into the dark wood again."
    assert tools.overlaps(line, tools.shingles("He said: " + line, 1))
    assert not tools.overlaps(line[::-1], tools.shingles(line, 1))


def test_prepared_chats_read_exactly_as_the_chat_template_writes_them(
    tools: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    import demo_dialogues
    import demo_plots
    import demo_stories
    import demo_tokens

    rng = random.Random(4)
    for _ in range(20):
        chat = demo_dialogues.small_talk(rng, lambda: demo_stories.plot_turn(*demo_plots.own_story(rng), rng))
        entries = demo_tokens.encode_document(tokenizer.backend_tokenizer, chat, answers_only=True)
        ids = (entries & (demo_tokens.NO_LOSS - 1)).tolist()
        whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert ids[:-1] == whole[: len(ids) - 1]
        learned = tokenizer.decode(ids_with_loss(entries, demo_tokens.NO_LOSS), skip_special_tokens=True)
        assert learned == "".join(m["content"] for m in chat if m["role"] == "assistant")


def ids_with_loss(entries: object, no_loss: int) -> list[int]:
    """The tokens that training learns to write."""
    return [int(e) for e in entries if e < no_loss]  # type: ignore[attr-defined]
