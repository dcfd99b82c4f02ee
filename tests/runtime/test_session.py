"""A whole session with real workers: what it leaves, and what happens when a worker dies or hangs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.config import build_config
from nereus.data import PromptTokens
from nereus.runtime.engine import CommandError, Engine, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.ppo_steps import retokenize
from nereus.runtime.session import Session
from storage.records import read_records
from tests.parity.conftest import save_llama
from tests.runtime.steps import prepare_step, run_step

STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 16, "max_response_tokens": 16},
    "steps": 2,
    "cluster": {"devices": 2, "memory_per_device": "1GiB"},
}


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=1 << 30, silent_after_s=2.0) as engine:
        engine.start([0, 1])
        yield engine


def open_session(folder: Path, engine: Engine | None = None, **tree: Any) -> Session:
    config = build_config({**TREE, **tree, "run_dir": str(folder / "run")})
    return Session.open(config, run_id="run", engine=engine)


def test_a_run_leaves_metrics_and_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open_session(tmp_path) as session:
        pids = session.worker_pids()
        lines = [run_step(session, step) for step in session.steps]
        summary = session.finish()
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["policy_version"] for line in lines] == [0, 2]
    assert len({line["sample_ids_digest"] for line in lines}) == 2
    assert [r["rollouts_digest"] for r in read_records(str(tmp_path / "run" / "metrics.jsonl"))] == [
        line["rollouts_digest"] for line in lines
    ]
    model = AutoModelForCausalLM.from_pretrained(summary["final"])
    assert sum(p.numel() for p in model.parameters()) > 1000
    assert AutoTokenizer.from_pretrained(summary["final"]).eos_token_id is not None
    assert pids and not any(is_alive(pid) for pid in pids.values())


def test_what_was_needed_before_a_step_is_none_of_its_memory(tmp_path: Path) -> None:
    """Neither its peak nor what the heap has mapped by then: a smaller plan after a larger one is judged by itself."""
    before = 256 * 2**20
    with LocalEngine("tests.runtime.open_rank:OpenRank", memory_per_device_bytes=1 << 30) as engine:
        engine.start([0, 1])
        with open_session(tmp_path, engine) as session:
            kwargs = {device: {"num_bytes": before} for device in (0, 1)}
            run_command(engine, "use_memory", kwargs, label="memory", step=None)
            peaks = run_step(session, 0)["peak_memory_bytes"]
            assert session.outcome is not None
            judged = session.outcome.peak_bytes
            read = run_command(engine, "read_memory", {0: {}, 1: {}}, label="memory", step=None)
    assert max(peaks.values()) < before / 4
    for device, (_, mapped) in read.items():
        assert mapped > before / 2
        assert peaks[str(device)] <= judged[device] < 1.1 * peaks[str(device)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("sent", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "silent for 2 s")], ids=["killed", "stopped"]
)
@pytest.mark.parametrize("stage", ["generate", "train_actor"])
def test_a_lost_worker_is_one_clear_error(
    tmp_path: Path, engine: LocalEngine, sent: signal.Signals, reason: str, stage: str
) -> None:
    layout = {"dp": 1, "tp": 2, "pp": 1}
    with open_session(tmp_path, engine, plan=dict.fromkeys(STAGES, layout)) as session:
        run_step(session, 0)
        prepare_step(session, 1)
        os.kill(engine.pids()[1], sent)
        started = time.monotonic()
        with pytest.raises(CommandError) as caught:
            getattr(session, stage)(1)
        assert time.monotonic() - started < 20
    name = "actor.generation" if stage == "generate" else "actor.training"
    for word in ("device 1", name, "step 1", reason):
        assert word in str(caught.value)


def test_generation_refuses_another_policy_version(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        run_step(session, 0)
        session.policy_version += 1
        with pytest.raises(CommandError, match=r"holds policy version 2, but 3 was asked for"):
            session.generate(1)


def test_model_stages_on_disjoint_devices_wait_only_for_their_own(tmp_path: Path, engine: LocalEngine) -> None:
    """While device 1 is held, training on device 0 runs to its end and training on device 1 doesn't start."""
    plan = {name: {"devices": [0]} for name in STAGES} | {"critic.training": {"devices": [1]}}
    with open_session(tmp_path, engine, plan=plan) as session, ThreadPoolExecutor(2) as pool:
        prepare_step(session, 0)
        with engine.devices_locked([1]):
            critic = pool.submit(session.train_critic, 0)
            actor = pool.submit(session.train_actor, 0)
            assert actor.result(timeout=60)["updates"] == 2
            assert not critic.done()
        assert critic.result(timeout=60)["updates"] == 2
        session.sync_weights(0)
        session.finish_step(0)


WHOLE_TOKENS = ["<pad>", "<bos>", "<eos>", "sun", "moon", "rain", "stone", "user", "assistant", ":", "[UNK]"]
CHAT = "{% for message in messages %}{{ '<bos>' + message['role'] + ' : ' + message['content'] + '<eos>' }}{% endfor %}"


def whole_words(chat_template: str | None) -> Any:
    """Return a tokenizer of whole words that begins every plain text with <bos>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WHOLE_TOKENS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    specials = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **specials)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("chat_template", "text", "expected"),
    [
        (None, "sun rain", "<bos> sun rain moon stone"),
        (
            CHAT,
            "(as the actor's template renders it)",
            "<bos> user : sun rain <eos> <bos> assistant : moon stone <eos>",
        ),
    ],
    ids=["plain", "chat"],
)
def test_a_reward_model_reads_the_text_in_its_own_tokens(chat_template: str | None, text: str, expected: str) -> None:
    """With a chat template of its own it gets the messages in it, specials once; without one, the plain text."""
    prompt = PromptTokens([5, 6, 7], text, {}, [{"role": "user", "content": "sun rain"}])
    response = " moon stone" if chat_template is None else "moon stone"
    sample = retokenize(whole_words(chat_template), prompt, response)
    assert [WHOLE_TOKENS[token] for token in sample.tokens] == expected.split()


@pytest.mark.parametrize("chat_template", [None, CHAT], ids=["plain", "chat"])
def test_scores_of_a_reward_model_with_other_tokens(
    tmp_path: Path, engine: LocalEngine, chat_template: str | None
) -> None:
    """The scores are those of `transformers` on the text, in the reward model's tokens, read at the last one."""
    from transformers import AutoModelForSequenceClassification

    reward_path = save_llama(tmp_path / "reward", seed=1, score_head=True)
    tokenizer = whole_words(chat_template)
    tokenizer.save_pretrained(reward_path)
    plan = {name: {"devices": [0]} for name in (*STAGES, "reward.inference")}
    tree = {"reward": {"model": str(reward_path)}, "data": {"prompts": str(write_prompts(tmp_path))}, "plan": plan}
    with open_session(tmp_path, engine, **tree) as session:
        session.generate(0)
        session.score(0)
        rollouts, actor_tokenizer = session.rollouts, session.job.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(reward_path)
    assert rollouts.scores is not None
    for prompt, response, score in zip(rollouts.prompts, rollouts.responses, rollouts.scores, strict=True):
        answer = actor_tokenizer.decode(response.tokens, skip_special_tokens=True)
        text = f"<bos> {prompt.text}{answer}"
        if chat_template is not None:
            text = f"<bos>user : {prompt.text}<eos><bos>assistant : {answer}<eos>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = model(ids).logits[0, 0].item()
        assert score.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert rollouts.scores.std() > 0


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("sun rain", "stone", "moon sun moon")))
    return file
