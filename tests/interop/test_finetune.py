"""Training under the library's Trainer: masks, depths, gradients, memory, and low-rank adapters."""

import dataclasses

import peft
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import looplab
from looplab.interop import LooplabForCausalLM
from looplab.interop.finetune import (
    MemoryNotice,
    PromptMask,
    SampledDepth,
    citizen_of,
    lora_targets,
    memory_of,
    with_law,
)
from looplab.models.base import PRESETS, build
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.loop import forward
from looplab.recurrence.state import item_of, standard_noise
from looplab.training.memory import estimate
from looplab.training.step import draw_depth
from tolerances import EXACT

SHAPE = "tiny-core"
long = pytest.mark.usefixtures("unchecked")
"""Training steps, where most time would go into the checking of annotations."""


def wrapped(preset=SHAPE):
    return LooplabForCausalLM.wrap(build(PRESETS[preset](), seed=1))


def rows(count=8, seed=0):
    """Questions of ragged length whose answer is their first letter, three times."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        prompt = torch.randint(2, 63, (3 + index % 3,), generator=generator).tolist()
        found.append({"input_ids": prompt + [prompt[0]] * 3, "prompt_tokens": len(prompt)})
    return found


def arguments(folder, **changes):
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    return TrainingArguments(str(folder), **{**given, **fixed, **changes})


def trainer(model, folder, *, data=None, callbacks=(), **changes):
    return Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=data or rows(),
        data_collator=PromptMask(pad=0),
        callbacks=list(callbacks),
    )


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_batch_scores_answers_only():
    batch = PromptMask(pad=9)(
        [
            {"input_ids": [1, 2, 3, 4], "prompt_tokens": 2},
            {"input_ids": [5, 6], "prompt_tokens": 1},
            {"input_ids": [7, 8, 1], "labels": [-100, -100, 1]},
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 9, 9], [7, 8, 1, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 3, 4], [-100, 6, -100, -100], [-100, -100, 1, -100]]


def test_a_prompt_may_end_with_a_separator():
    collate = PromptMask(pad=0, separator=[5, 6])
    batch = collate([{"input_ids": [1, 5, 5, 6, 2, 5, 6, 3]}, {"input_ids": [5, 6, 4]}])
    assert batch["labels"].tolist() == [[-100] * 4 + [2, 5, 6, 3], [-100, -100, 4] + [-100] * 5]
    with pytest.raises(ValueError, match=r"every row must hold the separator \[5, 6\]. Got \[1, 5\]\.\.\. without it"):
        collate([{"input_ids": [1, 5]}])
    with pytest.raises(ValueError, match="separator must have at least one id, or be None"):
        PromptMask(pad=0, separator=[])
    with pytest.raises(
        ValueError, match="must have prompt_tokens or labels. Got neither. Set remove_unused_columns=False"
    ):
        PromptMask(pad=0)([{"input_ids": [1, 2]}])


@long
def test_the_loss_falls_while_depths_vary(tmp_path):
    model, depths = wrapped(), SampledDepth(seed=3)
    ran, run_plan = [], model.model.spec
    step = model.model.step
    model.model.step = lambda *args, **kwargs: ran.append(1) or step(*args, **kwargs)
    run = trainer(model, tmp_path, callbacks=[depths], max_steps=12, gradient_accumulation_steps=2)
    run.train()
    assert sum(losses(run)[-3:]) < 0.8 * sum(losses(run)[:3])
    assert depths.drawn == [draw_depth(run_plan, 3, k)[0] for k in range(12)] and len(set(depths.drawn)) > 2
    assert len(ran) == 2 * sum(depths.drawn)  # both micro-batches of a step, and nothing else
    ran.clear()
    model.train()
    model(torch.tensor([[1, 2]]))
    assert len(ran) == 4  # the callback has let go of the model


@long
def test_gradients_are_those_of_a_plain_loop_whatever_the_batch_is_cut_into(tmp_path):
    model, data = wrapped(), rows(4)
    model.gradient = TruncatedBPTT(window=2)
    start = weights(model)
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "data_seed": 1}
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    trainer(
        model, tmp_path, data=data, callbacks=[SampledDepth(FixedDepth(num_steps=5), seed=2)], **cut, **options
    ).train()

    plain = wrapped().model
    batch = PromptMask(pad=0)(data)
    ids, valid, labels = batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]
    items = [item_of(*row[keep].tolist()) for row, keep in zip(ids, valid, strict=True)]
    places = (valid.long().cumsum(1) - 1).clamp(min=0)
    noise = standard_noise(item_of("noise", 2, 0), items, places, 32)
    logits = forward(plain, ids, num_steps=5, noise=noise, valid=valid, gradient=TruncatedBPTT(window=2)).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    moved = {name: start[f"model.{name}"] - p.grad for name, p in plain.named_parameters() if p.grad is not None}
    after = {name: model.state_dict()[f"model.{name}"] for name in moved}
    torch.testing.assert_close(after, moved, rtol=1e-4, atol=1e-5)
    assert max(float((moved[name] - start[f"model.{name}"]).abs().max()) for name in moved) > 0.1


@long
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path):
    whole = SampledDepth(seed=5)
    one = wrapped()
    trainer(one, tmp_path / "a", callbacks=[whole], save_strategy="steps", save_steps=2, num_train_epochs=2).train()
    rest, other = SampledDepth(seed=5), wrapped()
    again = trainer(other, tmp_path / "a", callbacks=[rest], save_strategy="no", num_train_epochs=2)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert rest.drawn == whole.drawn[2:] and len(rest.drawn) == 2
    torch.testing.assert_close(weights(other), weights(one), **EXACT)


@long
def test_recomputation_is_switched_on_by_the_librarys_argument(tmp_path):
    plain, saving = wrapped(), wrapped()
    depths = [SampledDepth(seed=1), SampledDepth(seed=1)]
    trainer(plain, tmp_path, callbacks=depths[:1], max_steps=2).train()
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    switch = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    trainer(saving, tmp_path, callbacks=depths[1:], max_steps=2, **{switch: True}).train()
    assert saving.strategy.recomputes and not plain.strategy.recomputes
    torch.testing.assert_close(weights(saving), weights(plain), **EXACT)


def test_evaluation_runs_at_the_depth_it_asks_for():
    model, depths = wrapped("tiny-no-envelope"), SampledDepth(FixedDepth(num_steps=7), seed=0)
    state = type("State", (), {"global_step": 0})
    depths.on_train_begin(None, state, None, model=model)
    depths.on_step_begin(None, state, None)
    ids = torch.tensor([[1, 2, 3]])
    expected = {n: model.eval()(ids, num_steps=n).logits for n in (2, 4, 7)}
    torch.testing.assert_close(model(ids).logits, expected[4], **EXACT)
    torch.testing.assert_close(model.train()(ids).logits, expected[7], **EXACT)
    torch.testing.assert_close(model(ids, num_steps=2).logits, expected[2], **EXACT)
    depths.on_train_end(None, state, None)
    torch.testing.assert_close(model(ids).logits, expected[4], **EXACT)


def test_noise_is_another_one_in_every_step():
    model, depths = wrapped(), SampledDepth(FixedDepth(num_steps=2), seed=0)
    state = type("State", (), {"global_step": 0})
    depths.on_train_begin(None, state, None, model=model)
    ids, seen = torch.tensor([[1, 2, 3]]), []
    for step in (0, 1, 0):
        state.global_step = step
        depths.on_step_begin(None, state, None)
        seen.append(model.train()(ids).logits)
    torch.testing.assert_close(seen[0], seen[2], **EXACT)
    assert not torch.allclose(seen[0], seen[1])


def test_laws_that_name_no_number_of_steps_are_refused():
    spec = build(PRESETS[SHAPE]()).spec
    assert with_law(spec, None) == spec
    assert with_law(spec, FixedDepth(num_steps=3)).trained_depth == FixedDepth(num_steps=3)
    with pytest.raises(ValueError, match="law must be one of numbers of steps.*which draws prefixes of a plan"):
        with_law(spec, PrefixDepth(law=UniformDepth(low=1, high=2)))
    with pytest.raises(ValueError, match="law must be one of numbers of steps.*as the model declares"):
        with_law(build(PRESETS["tiny-no-envelope"]()).spec, None)
    with pytest.raises(ValueError, match="has 4 iterations; iteration 4 asked for"):
        with_law(build(PRESETS["tiny-blocks"]()).spec, FixedDepth(num_steps=5))


def test_memory_is_printed_before_the_first_step(tmp_path, capsys):
    model = wrapped()
    model.gradient = TruncatedBPTT(window=2)
    run = trainer(model, tmp_path, callbacks=[MemoryNotice(tokens=9)], max_steps=1)
    run.train()
    first = capsys.readouterr().out.splitlines()[0]
    expected = estimate(model.model, rows=2, tokens=9, num_steps=8, gradient=TruncatedBPTT(window=2))
    assert first == f"{expected.line()}  (2 x 9 tokens, 8 steps, TruncatedBPTT(window=2))"
    notice = MemoryNotice(tokens=9, num_steps=3)
    notice.on_train_begin(arguments(tmp_path, optim="adafactor"), run.state, None, model=model)
    said = capsys.readouterr().out
    assert "3 steps" in said and said.rstrip().endswith("optimizer adafactor counted as AdamW)")


TARGETS = ("prelude", "core", "coda", "injection")


def adapted(model, parts=TARGETS):
    torch.manual_seed(0)
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=lora_targets(model, parts))
    )


def test_memory_of_adapters_counts_their_gradients_alone():
    model = wrapped()
    whole = memory_of(model, rows=2, tokens=9, num_steps=3)
    assert whole == estimate(model.model, rows=2, tokens=9, num_steps=3)
    small = memory_of(adapted(wrapped(), ("core",)), rows=2, tokens=9, num_steps=3)
    assert small.gradients == 4 * 2 * sum(a + b for a, b in [(32, 32)] * 8 + [(32, 48)] * 4 + [(48, 32)] * 2)
    assert small.weights == whole.weights + small.gradients and small.optimizer < whole.optimizer / 5
    own = {"weights": 0, "gradients": 0, "optimizer": 0, "update": 0}
    assert dataclasses.replace(small, **own) == dataclasses.replace(whole, **own)
    assert small.update < whole.update
    again = memory_of(adapted(wrapped(), ("core",)), rows=2, tokens=9, num_steps=3, accumulates=True)
    assert again == dataclasses.replace(small, earlier=small.gradients)


def test_targets_are_the_linear_maps_of_the_parts():
    model = wrapped()
    assert len(lora_targets(model)) == 14 and len(lora_targets(model, TARGETS)) == 14 + 7 + 7 + 1
    assert lora_targets(model, ("injection",)) == ["model.injections.0.rule.w"]
    assert len(lora_targets(wrapped("tiny-dense"))) == 21
    assert all(isinstance(model.get_submodule(name), torch.nn.Linear) for name in lora_targets(model, TARGETS))
    with pytest.raises(ValueError, match="parts must be some of coda, core, injection, prelude. Got 'core'"):
        lora_targets(model, "core")
    with pytest.raises(ValueError, match="parts must be some of"):
        lora_targets(model, ("head",))
    with pytest.raises(ValueError, match="parts must hold a linear map. Got coda, which have none here"):
        lora_targets(wrapped("tiny-no-envelope"), ("coda",))


def test_a_model_of_another_class_is_refused():
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(ValueError, match="must be a LooplabForCausalLM, or a wrapper around one. Got LlamaForCausalLM"):
        citizen_of(llama)
    model = wrapped()
    assert citizen_of(adapted(model)) is model


@long
def test_adapters_train_alone_and_come_back(tmp_path):
    model = adapted(wrapped())
    before = weights(model)
    depths = SampledDepth(seed=3)
    run = trainer(model, tmp_path / "run", callbacks=[depths], max_steps=8, learning_rate=3e-2)
    run.train()
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_" in name}  # all of them, and nothing else
    assert sum(losses(run)[-3:]) < 0.9 * sum(losses(run)[:3]) and len(set(depths.drawn)) > 1

    ids = torch.tensor([[1, 2, 3, 4]])
    model.eval()
    logits = model(input_ids=ids, num_steps=3).logits
    decoded = model.generate(input_ids=ids, num_steps=3, max_new_tokens=3, do_sample=False, pad_token_id=63)
    model.save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").glob("adapter*")) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    again = peft.PeftModel.from_pretrained(wrapped(), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=ids, num_steps=3).logits, logits, **EXACT)

    merged = again.merge_and_unload()
    assert isinstance(merged, LooplabForCausalLM)
    merged.save_pretrained(tmp_path / "merged")
    ours = looplab.load(tmp_path / "merged").model
    torch.testing.assert_close(ours.state_dict(), merged.model.state_dict(), **EXACT)
    opened = LooplabForCausalLM.wrap(ours)
    torch.testing.assert_close(opened(ids, num_steps=3).logits, logits, rtol=1e-4, atol=1e-4)
    told = opened.generate(ids, num_steps=3, max_new_tokens=3, do_sample=False, pad_token_id=63)
    torch.testing.assert_close(told, decoded, **EXACT)


def test_every_adapter_is_on_the_path_of_the_gradient():
    model = adapted(wrapped()).train()
    ids = torch.tensor([[1, 2, 3, 4]])
    model(input_ids=ids, labels=ids, num_steps=2).loss.backward()
    rising = [name for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name]
    assert len(rising) == 29
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in rising)
