"""Messages become a prompt by the tokenizer's own template, in a sandbox."""

import pytest

from looplab.engine.request import RefusedError
from looplab.server.chat import ChatTemplate, special_text
from server.live import byte_tokenizer

HI = [{"role": "user", "content": "hi"}]


class Special:
    """A tokenizer whose special tokens have texts."""

    bos, eos, pad, chat_template, vocab = 0, 1, None, None, 2

    def encode(self, text, special=True):
        return []

    def decode(self, ids):
        return ""

    def written(self, token):
        return ("<s>", "</s>")[token]


def rendered(source, messages=HI):
    return ChatTemplate(source, Special()).render(messages)


def test_special_tokens_and_the_mark_of_a_generation_are_known():
    source = "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert rendered(source + "{% if add_generation_prompt %}{{ eos_token }}{% endif %}") == "<s>hi</s>"
    assert rendered("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert rendered("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4
    assert special_text(Special(), "pad") is None and special_text(byte_tokenizer(), "eos") is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_must_not_do_refuses_the_request(source):
    with pytest.raises(RefusedError, match="the chat template refuses these messages") as error:
        rendered(source)
    assert error.value.code == "invalid_value"


def test_what_is_no_template_is_refused_at_the_start():
    with pytest.raises(ValueError, match="chat_template must be a Jinja template"):
        ChatTemplate("{% if %}", Special())
