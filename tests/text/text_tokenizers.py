"""Tokenizers that differ in kind, trained on a few sentences, with the control tokens of all templates."""

import json

from text_helpers import CORPUS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST] [TOOL_CALLS] "
    "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] <start_of_turn> <end_of_turn> "
    "<|system|> <|user|> <|assistant|> <|end|> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> "
    "<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
    "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>"
).split()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCES = [*CORPUS, "日本語のテスト。 Tōkyō 🗼", "The sum of one and two is three; the tool said so."] * 3
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_level():
    """Byte-level BPE, as of GPT-2, Llama 3 or Qwen: every byte has a token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(core, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))


def splitting():
    """Byte-level BPE, as of Llama 3: words by a pattern, known words whole, its own start token."""
    core = Tokenizer(models.BPE(ignore_merges=True))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]),
        ]
    )
    return _wrapped(core)


def normalizing():
    """Byte-level BPE that composes letters and accents first, as of Qwen: what it reads is not the text."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_fallback():
    """BPE on letters with bytes for the rare ones, as of Gemma: spaces become ▁, nothing is put in front."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<unk>", *BYTES], limit_alphabet=60, show_progress=False
        ),
    )
    # The trainer makes bytes tokens that are looked for in the text; in such a vocabulary they are not.
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    core = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    core.normalizer = trained.normalizer
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrapped(core)


def unigram():
    """Unigram on metaspace, as of sentencepiece: ▁ before the first word, runs of spaces kept."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return _trained(core, trainer)


def word_piece():
    """WordPiece, as of BERT: lower case, accents and white space are lost."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    return _trained(core, trainer)


KINDS = {
    "byte-level": byte_level,
    "splitting": splitting,
    "normalizing": normalizing,
    "byte-fallback": byte_fallback,
    "unigram": unigram,
    "word-piece": word_piece,
}
BYTE_LEVEL = ("byte-level", "splitting")
LOSSLESS = (*BYTE_LEVEL, "byte-fallback")


def _trained(core, trainer):
    core.train_from_iterator(SENTENCES, trainer)
    return _wrapped(core)


def _wrapped(core):
    return PreTrainedTokenizerFast(
        tokenizer_object=core, extra_special_tokens=CONTROL, clean_up_tokenization_spaces=False, **SPECIAL
    )
