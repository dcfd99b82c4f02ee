"""Reading and encoding prompts, and what is said about broken ones."""

import json

import fsspec
import pytest
import xxhash

from nereus.data import encode_prompts, fingerprint, read_prompts


class LetterTokenizer:
    """One token a character, with a beginning-of-text token and a one-line chat template."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        assert not tokenize
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return "\x01" + text + "<assistant>" * add_generation_prompt


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def test_prompts_keep_their_order_and_other_keys(tmp_path):
    chat = [{"role": "user", "content": "2 + 3?"}]
    url = write(tmp_path / "p.jsonl", {"prompt": "Grüße", "answer": 5, "tags": ["a"]}, b"", {"prompt": chat}, b"")
    first, second = read_prompts(url)
    assert (first.prompt, first.example) == ("Grüße", {"answer": 5, "tags": ["a"]})
    assert (second.prompt, second.example) == (chat, {})
    assert second.where.endswith("line 3")


def test_any_fsspec_url_is_read():
    with fsspec.open("memory://prompts/p.jsonl", "wb") as file:
        file.write(b'\xef\xbb\xbf{"prompt": "x"}\r\n')
    assert [example.prompt for example in read_prompts("memory://prompts/p.jsonl")] == ["x"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "x"', "line 2 is not JSON"),
        (b'{"prompt": "\xff"}', "line 2 is not JSON"),
        (b'["x"]', "line 2 is not an object"),
        (b'{"text": "x"}', "line 2 has no \"prompt\" among its keys \\['text'\\]"),
        (b'{"prompt": ""}', "line 2 has a"),
        (b'{"prompt": 3}', "line 2 has a"),
        (b'{"prompt": []}', "line 2 has a"),
        (b'{"prompt": [{"content": "no role"}]}', "line 2 has a"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, said):
    url = write(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ValueError, match=f"^data.prompts: .*p.jsonl {said}.*[.]$"):
        read_prompts(url)


def test_errors_of_a_store_are_one_sentence_without_secrets(monkeypatch):
    class NoCredentialsError(Exception):
        pass

    def refuse(self, path, *args, **kwargs):
        raise NoCredentialsError(f"no access to\nhttps://user:pass@host/{path}?X-Amz-Signature=abc123")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", refuse)
    with pytest.raises(ValueError, match=r"^data.prompts: .*can't be read \(NoCredentialsError: no access") as caught:
        read_prompts("memory://key:secret@bucket/p.jsonl")
    said = str(caught.value)
    assert "\n" not in said and not any(word in said for word in ("secret", "pass", "abc123")), said


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone.jsonl can't be read \(there is no such file\)"):
        read_prompts(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ValueError, match=r"p\.jsonl is empty"):
        read_prompts(write(tmp_path / "p.jsonl", b"", b"  "))
    with pytest.raises(ValueError, match="nosuch://x can't be read"):
        read_prompts("nosuch://x")


def test_the_fingerprint_is_of_the_bytes(tmp_path):
    url = write(tmp_path / "p.jsonl", b"ab")
    assert fingerprint(url) == xxhash.xxh3_128_hexdigest(b"ab")


def test_prompts_become_tokens(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    url = write(tmp_path / "p.jsonl", {"prompt": "ab", "answer": 1}, {"prompt": chat})
    plain, rendered = encode_prompts(read_prompts(url), LetterTokenizer(), 100)
    assert (plain.token_ids, plain.text, plain.example) == ([1, 97, 98], "ab", {"answer": 1})
    assert rendered.text == "\x01<user>hi<assistant>"
    assert rendered.token_ids == [ord(letter) for letter in rendered.text]  # no second beginning-of-text token


def test_long_prompts_are_dropped_with_one_warning(tmp_path, caplog):
    url = write(tmp_path / "p.jsonl", {"prompt": "abc"}, {"prompt": "a"}, {"prompt": "abcd"})
    assert [prompt.text for prompt in encode_prompts(read_prompts(url), LetterTokenizer(), 3)] == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        "Dropped 2 of 3 prompts longer than rollout.max_prompt_tokens = 3."
    ]
    with pytest.raises(ValueError, match="raise it to at least 2"):
        encode_prompts(read_prompts(url), LetterTokenizer(), 1)


def test_a_missing_chat_template_is_named(tmp_path):
    class Bare(LetterTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            raise ValueError("no template is set")

    url = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ValueError, match=r"line 1 holds chat messages .*no template is set.*plain text"):
        encode_prompts(read_prompts(url), Bare(), 10)


def test_hugging_face_tokenizers_fit(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "user": 2}, unk_token="<s>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    url = write(tmp_path / "p.jsonl", {"prompt": "a a"}, {"prompt": [{"role": "user", "content": "a"}]})
    assert [prompt.token_ids for prompt in encode_prompts(read_prompts(url), tokenizer, 8)] == [[1, 1], [2, 1]]
