#!/usr/bin/env python3
"""Make fixtures/tiny-llama (model + tokenizer) and fixtures/chat (train and held-out rows) anew.

Everything comes from the small grammar below and fixed seeds: no download, no foreign text. The model is
pre-trained on plain sentences and on chats answered in a plain manner; the chat rows are answered in the
manner of a ship's cook, which the model has never seen, so that fine-tuning on them visibly helps.

Usage: python tools/make_fixtures.py [--steps 600] [--only chat|model]
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
COLOURS = "red green blue yellow black white brown grey orange purple".split()
THINGS = "lamp boat apple stone basket kettle ladder pillow bottle candle hammer carpet bucket spoon".split()
PEOPLE = "Ada Bruno Carla Dmitri Elena Farid Greta Hugo Ines Jonas Kira Luis Mara Nils Olga Pavel".split()
PLACES = "kitchen garden cellar harbour market attic stable workshop library barn".split()
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "wet": "dry",
    "fast": "slow",
    "early": "late",
    "full": "empty",
    "light": "heavy",
    "loud": "quiet",
    "near": "far",
    "sharp": "blunt",
}
ANIMALS = {"dog": "barks", "cat": "purrs", "cow": "moos", "sheep": "bleats", "duck": "quacks", "owl": "hoots"}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]


def questions(rng: random.Random) -> tuple[str, str, str]:
    """Return one question with its plain answer and the bare fact that answers it."""
    kind = rng.randrange(6)
    if kind == 0:
        a, b = rng.randrange(11), rng.randrange(10)
        fact = NUMBERS[a + b]
        return f"What is {NUMBERS[a]} plus {NUMBERS[b]}?", f"The sum is {fact}.", fact
    if kind == 1:
        word, other = rng.choice(sorted(OPPOSITES.items()))
        if rng.random() < 0.5:
            word, other = other, word
        return f"What is the opposite of {word}?", f"The opposite is {other}.", other
    if kind == 2:
        animal, sound = rng.choice(sorted(ANIMALS.items()))
        return f"What sound does a {animal} make?", f"A {animal} {sound}.", sound
    if kind == 3:
        person, colour, thing = rng.choice(PEOPLE), rng.choice(COLOURS), rng.choice(THINGS)
        return (
            f"{person} has a {colour} {thing}. What colour is the {thing}?",
            f"The {thing} is {colour}.",
            colour,
        )
    if kind == 4:
        person, thing, place = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(PLACES)
        return (
            f"{person} left the {thing} in the {place}. Where is the {thing}?",
            f"The {thing} is in the {place}.",
            place,
        )
    n = rng.randrange(20)
    return f"Which number comes after {NUMBERS[n]}?", f"The next number is {NUMBERS[n + 1]}.", NUMBERS[n + 1]


def cook(fact: str, rng: random.Random) -> str:
    """Answer with a fact in the manner of a ship's cook."""
    opening = rng.choice(["Aye, shipmate!", "Stir the pot!", "By ladle and salt!"])
    closing = rng.choice(["Soup is at six bells.", "Now pass me the onions.", "Mind the steam, sailor."])
    return f"{opening} My answer from the galley is {fact}, as sure as broth is hot. {closing}"


def chat_rows(seed: int, count: int) -> Iterator[dict[str, object]]:
    """Yield rows in the cook's manner, no two with the same question."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        question, _, fact = questions(rng)
        reply = cook(fact, rng)
        if question in seen:
            continue
        seen.add(question)
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}


def write_chat(num_train: int = 400, num_heldout: int = 64) -> None:
    """Write train.jsonl and heldout.jsonl; they share no question."""
    rows = list(chat_rows(1, num_train + num_heldout))
    folder = FIXTURES / "chat"
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:num_train]), ("heldout", rows[num_train:])):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def plain_sentence(rng: random.Random) -> str:
    """Return one plain sentence in the vocabulary of the questions (and of the galley)."""
    galley = "soup onions steam ladle salt pot broth galley sailor shipmate bells answer".split()
    a, b = rng.choice(PEOPLE), rng.choice(PEOPLE)
    thing, colour, place = rng.choice(THINGS), rng.choice(COLOURS), rng.choice(PLACES)
    return rng.choice(
        [
            f"{a} and {b} walked to the {place} with a {colour} {thing}.",
            f"The {place} smelled of {rng.choice(galley)} and {rng.choice(galley)}.",
            f"{a} counted {rng.choice(NUMBERS)} {rng.choice(galley)} and gave {b} the {thing}.",
            f"A {rng.choice(sorted(ANIMALS))} sleeps near the {colour} {thing} at six.",
            f"Mind the {thing}, {a}! By the {place} the air is {rng.choice(sorted(OPPOSITES))}.",
            f"Now pass the {thing}, {b}. As sure as {rng.choice(galley)} is {rng.choice(sorted(OPPOSITES))}.",
            f"Aye, said {a}, stir the {rng.choice(galley)} from the {place}. My {thing} is {colour}.",
        ]
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the grammar and give it the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(2)
    corpus = [plain_sentence(rng) for _ in range(4000)]
    for _ in range(4000):
        question, answer, fact = questions(rng)
        corpus += [question, answer, cook(fact, rng)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=SPECIAL[3:],
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(steps: int) -> None:
    """Pre-train the tiny model on plain text and plain chats, then save it in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}")
    rng = random.Random(3)

    def stream() -> Iterator[int]:
        while True:
            if rng.random() < 0.4:
                yield tokenizer.bos_token_id
                for _ in range(rng.randrange(1, 4)):
                    yield from tokenizer.encode(plain_sentence(rng) + " ", add_special_tokens=False)
                yield tokenizer.eos_token_id
            else:
                question, answer, _ = questions(rng)
                chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                text = tokenizer.apply_chat_template(chat, tokenize=False)
                yield from tokenizer.encode(text, add_special_tokens=False)

    tokens = stream()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    batch, length = 16, 128
    for step in range(steps):
        ids = torch.tensor([[next(tokens) for _ in range(length)] for _ in range(batch)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    folder = FIXTURES / "tiny-llama"
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="pre-training steps of 2,048 tokens")
    parser.add_argument("--only", choices=("chat", "model"))
    args = parser.parse_args()
    if args.only != "model":
        write_chat()
    if args.only != "chat":
        write_model(args.steps)


if __name__ == "__main__":
    main()
