"""A byte-level tokenizer, chat templates with and without generation tags, and rows."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

WITH_TAGS = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
WITHOUT_TAGS = WITH_TAGS.replace("{% generation %}", "").replace("{% endgeneration %}", "")

CORPUS = [
    "What is the capital of France? It is Paris, of course.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "user assistant system tool developer",
]


def make_tokenizer(template=WITH_TAGS, **special):
    """Return a fresh byte-level tokenizer; special tokens can be changed or left out with None."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | special
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        **{name: token for name, token in names.items() if token is not None},
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*texts, system=None):
    """Return a row in which user and assistant speak in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return {"messages": messages}
