"""Tokenizers as they are served."""

from letters import Characters
from looplab.data.tokenizers import load_tokenizer
from looplab.engine.tokenizer import PlainTokenizer, ServedTokenizer


class Begun:
    """Bytes, whose texts begin with bos."""

    def __init__(self):
        self.inner = load_tokenizer("bytes")
        self.inner.starts_with_bos = True


def test_bytes_are_served_as_they_are():
    served = PlainTokenizer(load_tokenizer("bytes"))
    assert isinstance(served, ServedTokenizer) and isinstance(Characters(), ServedTokenizer)
    assert served.encode("ab") == [97, 98] and served.decode([97, 256, 98]) == "ab"
    assert (served.bos, served.eos, served.pad, served.vocab, served.chat_template) == (256, 257, 258, 259, None)


def test_texts_begin_with_bos_once_where_they_do():
    served = PlainTokenizer(Begun().inner)
    assert served.encode("a") == [256, 97]
    assert served.encode("a", special=False) == [97]
