"""The tiny Llama of the recordings, run again: states of scored tokens for every schedule, domain and split."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from looplab.audit.geometry import read_state
from looplab.interop.adapters.base import ADAPTERS
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import Plan

HERE = Path(__file__).parent / "dcp"
FITS = json.loads((HERE / "fits.json").read_text())
TENSORS = load_file(HERE / "fits.safetensors")
RECORDED = load_file(HERE / "io.safetensors")
LLAMA = load_file(HERE / "llama.safetensors")
SHAPE = json.loads((HERE / "geometry.json").read_text())
SCHEDULES = tuple(SHAPE["schedules"])


class Scored(NamedTuple):
    """The scored tokens of a split in document order."""

    before_norm: Tensor
    hidden: Tensor
    targets: Tensor
    documents: Tensor


@functools.cache
def model():
    fields = {name: value for name, value in SHAPE["model"].items() if name not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": SHAPE["model"]["rope_theta"]}
    native = LlamaForCausalLM(LlamaConfig(**fields, rope_parameters=rope)).eval()
    native.load_state_dict({name: value for name, value in LLAMA.items() if not name.startswith("tokens.")})
    return ADAPTERS["llama"].wrap(native)


@functools.cache
def scored(domain, split, schedule):
    """Padding lies to the right of causal layers and is never read."""
    name = f"tokens.{domain}.{split}"
    tokens = (LLAMA if split == "eval" else TENSORS)[name].long()
    plan = Plan.of((layer, 0) for layer in SHAPE["schedules"][schedule]["layers"])
    with torch.no_grad():
        context = model().encode(tokens.clamp_min(0))
        state = run_plan(model(), plan, context, model().init_state(context, None))
        before, hidden = read_state(state, model().spec.state), model().coda(state, context)
    place = torch.arange(tokens.shape[1] - 1) >= FITS["first_scored_logit_index"][domain]
    chosen = (tokens[:, 1:] >= 0) & place
    documents = torch.arange(len(tokens))[:, None].expand_as(chosen)[chosen]
    return Scored(before[:, :-1][chosen], hidden[:, :-1][chosen], tokens[:, 1:][chosen], documents)


def head(hidden):
    """Logits of what the head reads."""
    return hidden @ RECORDED["head_weight"].T.to(hidden.dtype)


def document_sums(losses, documents):
    """Sum of token losses per document."""
    return np.bincount(documents.numpy(), weights=losses)
