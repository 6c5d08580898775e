"""The default model's tokenizer: byte-level BPE trained on the corpus. Knows no network.

All 256 bytes are tokens, so every UTF-8 text comes back as it went in. Merges are learnt from the ASCII part of the
corpus alone: other characters stay several tokens long, which keeps half characters a daily matter for whoever streams
text.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from corpus import BEGIN_OF_TEXT, CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
MAX_LENGTH = 2048

# Everyday words that the corpus lacks, so that a client's own text is not spelt letter by letter.
COMMON_WORDS = """
about above across after again against air all almost along already also always among another answer any around ask away
because become before below better between book both bring business call came change city close come company could
country course different does done door during each earth easy else end enough even ever every example eye face fact
family father feel few follow form government great group grow hand head hear help here himself history however
idea important information interest into itself just keep kind know large last later learn leave let letter level life
line list little local machine many mean might mile mother mountain move must near need never new next number often
old only order other over own page paper part people person place plan play point possible power problem program
public question quite read really right room run same say school second seem sentence several should side since small
social something sometimes soon sound spell state still study such system table take talk than their them these
those thought through time together too turn under until upon use usually very walk watch water well were what when
where while white whole why will with within without word work world would write year young your
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of VOCABULARY_SIZE tokens; special tokens have the lowest ids, in the order of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [COMMON_WORDS.replace("\n", " ")] * 3
    tokenizer.train_from_iterator(chain((_plain(text) for text in texts), words), trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY_SIZE:
        raise ValueError(f"The corpus yields {size} tokens, not {VOCABULARY_SIZE}: give it more words.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A",
        pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT} $B",
        special_tokens=[(BEGIN_OF_TEXT, tokenizer.token_to_id(BEGIN_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (BEGIN_OF_TEXT, END_OF_TEXT, PAD)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )


def _plain(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, " ")
    return text.encode("ascii", "ignore").decode()
