"""Tokenizers that are trained on the spot, by the library `tokenizers`."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = SPECIAL = ("<pad>", "<eos>", "<unk>")


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def for_text(kind: str, lines: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of running text, of which every token stands for some of the text.

    Args:
        kind: "bpe" for pieces of bytes, "word" for what stands between spaces, with one token for the end of a line,
            or "character".
        lines: of the training text, with their line ends.
        vocabulary: the largest number of tokens.
    """
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
    elif kind == "word":
        tokenizer = Tokenizer(_words((word for line in lines for word in line.split()), vocabulary))
        tokenizer.normalizer = normalizers.Replace("\n", f" {END} ")
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer = Tokenizer(_words((character for line in lines for character in line), vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


def _words(words: Iterable[str], vocabulary: int) -> models.WordLevel:
    """The most frequent words. The library's own trainer gives those that are special too a second number."""
    counts = Counter(words)
    frequent = sorted((word for word in counts if word not in SPECIAL), key=lambda word: (-counts[word], word))
    known = [*SPECIAL, *frequent[: max(vocabulary - len(SPECIAL), 0)]]
    return models.WordLevel({word: number for number, word in enumerate(known)}, unk_token=UNKNOWN)


def for_sentences(sentences: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of sentences of several languages, by BPE on words with their spaces, so that decoding gives plain
    text back; it ends each with an end.

    Args:
        sentences: of all languages.
        vocabulary: the largest number of tokens.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return _wrapped(tokenizer)
