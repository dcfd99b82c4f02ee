"""Tokenizer files of folders anywhere."""

import os

import fsspec
import pytest
from transformers import AutoTokenizer

from nereus.config import resolve_path
from nereus.model.tokens import fetch_tokenizer

LOCAL = resolve_path("pkg://nereus.recipes/char-tokenizer")


def test_a_tokenizer_of_another_store_is_copied_and_removed(tmp_path):
    url = f"memory://{tmp_path.name}/model"
    filesystem = fsspec.filesystem("memory")
    for name in os.listdir(LOCAL):
        filesystem.put_file(os.path.join(LOCAL, name), f"{tmp_path.name}/model/{name}")
    filesystem.pipe_file(f"{tmp_path.name}/model/model.safetensors", b"large")
    filesystem.pipe_file(f"{tmp_path.name}/model/evil.py", b"import os")
    with fetch_tokenizer(url) as folder:
        assert not {"model.safetensors", "evil.py"} & set(os.listdir(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert not os.path.exists(folder)
    text = AutoTokenizer.from_pretrained(LOCAL, local_files_only=True).decode([4, 5])
    assert tokenizer.decode([4, 5]) == text


def test_a_local_folder_is_given_as_it_is():
    with fetch_tokenizer(LOCAL) as folder:
        assert folder == LOCAL
    assert os.path.isdir(LOCAL)


def test_a_missing_folder_is_named():
    with pytest.raises(ValueError, match="does not exist"), fetch_tokenizer("memory://nowhere/at/all"):
        pass
