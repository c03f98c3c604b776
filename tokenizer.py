"""Tokenizers: `bytes`, a BPE or WordPiece trained on the corpus, any tiktoken encoding, BERT's vocab.txt; all saved as
JSON, which can run no code. tiktoken and tokenizers are imported only where they are needed. Text -> ids is done
offline, by data_analyze.py; a run needs ids -> text alone, for its samples.
"""
import json
import re
import threading
from pathlib import Path

import numpy as np

LONGEST_RUN = 65_536    # more white space than this in one run overflows the stack of tiktoken's regular expressions


def tiktoken_encoding(name, limit_s=20):
    """tiktoken.get_encoding, refused within limit_s seconds where its vocabulary is neither cached nor fetchable."""
    import tiktoken
    result = []

    def load():
        try:
            result.append(tiktoken.get_encoding(name))
        except Exception as e:
            result.append(e)
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(limit_s)
    if result and not isinstance(result[0], Exception):
        return result[0]
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"--tokenizer={name} is unknown; it takes bpe, bytes, a tokenizer.json, "
                         f"or one of {', '.join(tiktoken.list_encoding_names())}")
    why = type(result[0]).__name__ if result else f"no answer in {limit_s} s"
    raise ValueError(f"--tokenizer={name}: its vocabulary file is not cached and cannot be fetched ({why}); "
                     "put it into a folder under the name that tiktoken gives it (the SHA-1 of its address) "
                     "and set TIKTOKEN_CACHE_DIR, or use --tokenizer=bpe")


def wordpiece(vocab, lowercase, train_on=None, vocab_size=0):
    """BERT's tokenizer over a vocabulary, or one trained on an iterator of texts, as the tokenizers library has it."""
    try:
        import tokenizers as t
    except ImportError:
        raise ValueError("WordPiece needs the package tokenizers: pip install tokenizers") from None
    pieces = t.Tokenizer(t.models.WordPiece({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]"))
    pieces.normalizer = t.normalizers.BertNormalizer(lowercase=lowercase)
    pieces.pre_tokenizer, pieces.decoder = t.pre_tokenizers.BertPreTokenizer(), t.decoders.WordPiece()
    if train_on is not None:
        pieces.train_from_iterator(train_on, t.trainers.WordPieceTrainer(
            vocab_size=vocab_size, show_progress=False, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    return pieces


def read_vocab(file):
    """The spec of a BERT's vocab.txt, a token a line. Where no token has a capital letter, texts are lowercased."""
    try:
        vocab = Path(file).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--tokenizer={file} cannot be read ({e}); it must be a BERT's vocab.txt") from None
    missing = {"[UNK]", "[CLS]", "[SEP]", "[MASK]"} - set(vocab)
    if missing:
        raise ValueError(f"--tokenizer={file} lacks {', '.join(sorted(missing))}; it must be a BERT's vocab.txt, a "
                         "token a line")
    return {"kind": "wordpiece", "vocab": vocab, "lowercase": all(w == w.lower() or w[0] == "[" for w in vocab if w)}


class Tokenizer:
    """spec: {"kind": "bytes"} | {"kind": "tiktoken", "name"} | {"kind": "bpe", "pattern", "ranks": [latin-1 strings]} |
    {"kind": "wordpiece", "vocab": [strings], "lowercase"}. eot_id stands at the end of every document; special: the ids
    of [CLS], [SEP] and [MASK], if there are some. A special token's spelling inside a text is ordinary text."""

    def __init__(self, spec):
        self.spec, self.encoding, self.special, self.pieces = spec, None, None, None
        if spec["kind"] == "wordpiece":
            self.pieces = wordpiece(spec["vocab"], spec["lowercase"])
            self.special = {kind: spec["vocab"].index(f"[{kind.upper()}]") for kind in ("cls", "sep", "mask")}
            self.vocab_size, self.eot_id = len(spec["vocab"]), self.special["sep"]
            return
        if spec["kind"] == "bytes":
            self.vocab_size, self.eot_id = 257, 256
            return
        if spec["kind"] == "tiktoken":
            self.encoding = tiktoken_encoding(spec["name"])
        else:
            import tiktoken
            ranks = {s.encode("latin-1"): i for i, s in enumerate(spec["ranks"])}
            self.encoding = tiktoken.Encoding("winnow-bpe", pat_str=spec["pattern"], mergeable_ranks=ranks,
                                              special_tokens={"<|endoftext|>": len(ranks)})
        self.vocab_size, self.eot_id = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        """str -> (n,) uint32 array, without eot_id. A run of white space over LONGEST_RUN is encoded in pieces."""
        if self.pieces is not None:
            return np.array(self.pieces.encode(text, add_special_tokens=False).ids, np.uint32)
        if self.encoding is None:
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        pieces, at = [], 0
        if len(text) > LONGEST_RUN:
            for run in re.finditer(rf"\s{{{LONGEST_RUN},}}", text):
                pieces += [text[at:run.start()]]
                pieces += [text[i:min(i + LONGEST_RUN, run.end())] for i in range(run.start(), run.end(), LONGEST_RUN)]
                at = run.end()
        pieces = [p for p in (*pieces, text[at:]) if p] or [""]
        return np.concatenate([self.encoding.encode_to_numpy(p, disallowed_special=()) for p in pieces])

    def decode(self, ids):
        """Token ids -> str; bytes that are no UTF-8 and ids without a token become U+FFFD, eot_id <|endoftext|>."""
        if self.pieces is not None:
            return self.pieces.decode([int(i) for i in ids], skip_special_tokens=False)

        def as_bytes(i):
            if self.encoding is None:
                return bytes([i]) if i < 256 else b"<|endoftext|>"
            try:
                return self.encoding.decode_single_token_bytes(i)
            except KeyError:            # large vocabularies have holes
                return "\ufffd".encode()
        return b"".join(as_bytes(int(i)) for i in ids).decode(errors="replace")


def load_tokenizer(folder):
    """The tokenizer of a store, or None where it was made elsewhere and only token ids are known."""
    file = Path(folder) / "tokenizer.json"
    return read_tokenizer(file, False) if file.is_file() else None


def read_tokenizer(file, must=True):
    """A tokenizer saved by data_analyze.py. Of a file that holds something else: None, or ValueError where it must."""
    try:
        return Tokenizer(json.loads(Path(file).read_text()))
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as e:
        if must:
            raise ValueError(f"--tokenizer={file} is no saved tokenizer ({type(e).__name__}: {e})") from None
    return None
