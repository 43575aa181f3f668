"""What every command that runs an engine may be told: depth, cache, sizes; and opening the engine with it."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, open_checkpoint
from looplab.cli.config_file import FromFile
from looplab.cli.exit_codes import UserError, user_error

if TYPE_CHECKING:
    from looplab.engine.config import EngineConfig
    from looplab.engine.engine import Engine
    from looplab.interop import LoadedModel
    from looplab.recurrence.exit.base import ExitRule


@dataclass(frozen=True, kw_only=True)
class EngineOptions(FromFile, ReadAs):
    """Options of an engine."""

    exit_rule: str | None = None
    """Stop every token by a rule (hazard, latent, acceleration, kl, entropy, argmax), or by the gate of --gate
    (lookahead, preloop, same_step). Default: every token runs all steps."""
    exit_threshold: float | None = None
    """The rule's number, such as 0.5."""
    min_steps: int = 1
    """No token stops before it."""
    max_steps: int | None = None
    """Every token stops there at the latest. Default: what the model itself runs."""
    exit_delay: int = 0
    """Steps that a token still runs after the rule fired."""
    draft_steps: int | None = None
    """Guess tokens at so many steps and let full depth confirm them: the same tokens as without, in fewer launches.
    Not together with an exit rule, unless --reuse pick decides for full depth."""
    draft_tokens: int = 4
    """Most guesses before they are confirmed."""
    gate: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Gate of `looplab gate`: a JSON file, or a folder with one; may be given several times."""
    accept_gate: str = ""
    """Take gates that were trained beside this other checkpoint, by its name or hash."""
    allow_costly_exit: tyro.conf.FlagCreatePairsOff[bool] = False
    """Load rules that need coda and head after every step although they cannot pay."""
    kv_rule: str | None = None
    """What the cache keeps: depth_indexed, last_exited, single, first, first_then_shared(s). Default: as trained,
    and last_exited where that is depth_indexed, which tokens that stop early would break."""
    numerics: Literal["exact", "fast"] = "fast"
    """exact: the same bits whatever else runs."""
    reuse: Literal["off", "check", "pick", "require"] = "check"
    """Whether later tokens can use what tokens leave that stopped early: say what `looplab reuse` found (check), choose
    by it (pick), refuse without a pass (require)."""
    launch_rows: int | None = None
    """Most rows of a launch. Default: 16 on a CPU, 64 on CUDA."""
    max_resident: int | None = None
    """Answers under way at once. Default: half as many again."""
    min_coda_rows: int | None = None
    """Rows that a readout waits for while others loop. Default: fitted at the start."""
    num_pages: int | None = None
    """Pages of the KV cache. Default: what --kv-fraction of the free memory holds."""
    kv_fraction: float = 0.5
    """Of the free memory, for the KV cache."""
    max_model_len: int | None = None
    """Longest text in tokens. Default: the model's."""
    device: str = "cpu"
    """Device of PyTorch: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the weights are cast to."""

    def engine_config(self) -> "EngineConfig":
        """Sizes and policies, as far as they were named."""
        from looplab.engine.config import EngineConfig

        return EngineConfig(
            launch_rows=self.launch_rows,
            max_resident=self.max_resident,
            min_coda_rows=self.min_coda_rows,
            num_pages=self.num_pages,
            kv_fraction=self.kv_fraction,
            max_model_len=self.max_model_len,
            numerics=self.numerics,
            kv_rule=self.kv_rule,
            reuse=self.reuse,
            exit_rule=self.exit_rule,
            exit_threshold=self.exit_threshold,
            min_steps=self.min_steps,
            max_steps=self.max_steps,
            exit_delay=self.exit_delay,
            draft_steps=self.draft_steps,
            draft_tokens=self.draft_tokens,
            allow_costly_exit=self.allow_costly_exit,
        )


def open_engine(model: str, options: EngineOptions) -> "Engine":
    """The engine of a command.

    Raises:
        UserError: The checkpoint does not open, cannot be served, or does not fit gate or options.
    """
    from looplab.cli.device import check_device
    from looplab.engine.slots import rule_of
    from looplab.interop import serving
    from looplab.interop.reuse import default_rule, settle_reuse

    check_device(options.device)
    if options.exit_threshold is not None and options.exit_rule is None:
        raise UserError("--exit-threshold needs --exit-rule. Got none. Name one, such as hazard.", exit_codes.USAGE)
    try:
        config = options.engine_config()
        if config.kv_rule is not None:
            rule_of(config.kv_rule)
    except ValueError as error:
        raise UserError(_in_flags(str(error)), exit_codes.USAGE) from None
    loaded = open_checkpoint(model, options, dtype=options.dtype, device=options.device)
    gates = read_gates(options, loaded)
    try:
        default_rule(config, gates)
    except (KeyError, ValueError) as error:
        said = f"--exit-rule and --exit-threshold: {error.args[0]}"
        raise UserError(said, exit_codes.USAGE) from None
    with user_error(exit_codes.MODEL, (ValueError, KeyError)):
        config, choice, results = settle_reuse(loaded, config, gates)
        engine = serving.open_engine(loaded, config, gates=gates, reuse=results)
    if choice is not None and choice.warns:
        print(f"warning: {choice.why}", file=sys.stderr)
    return engine


def read_gates(options: EngineOptions, loaded: "LoadedModel") -> Mapping[str, "ExitRule"]:
    """The rules of the gates that lie in the checkpoint's folder `gates`, and of --gate, by name."""
    from looplab.engine.gates import KINDS, GateError, gates_of, load_gate

    with user_error(exit_codes.MODEL, (GateError, ValueError)):
        gates = {**gates_of(loaded.folder, loaded.model)}
        for path in options.gate:
            gate = load_gate(path, loaded.model, accept=options.accept_gate)
            gates[gate.facts.gate] = gate
    named = options.exit_rule
    if named in KINDS and named not in gates:
        raise UserError(
            f"--exit-rule {named} needs its gate. Got {', '.join(gates) or 'none'}. Train it with looplab gate, and "
            "give --gate.",
            exit_codes.USAGE,
        )
    return {name: gate.rule(0.5) for name, gate in gates.items()}


def _in_flags(message: str) -> str:
    """What a configuration says of its fields, as it is said on a command line."""
    return re.sub(r"\b(?:EngineConfig\.|(?=kv_rule must))(\w+)", lambda m: f"--{m[1].replace('_', '-')}", message)
