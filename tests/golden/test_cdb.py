"""Our scheduler against every launch recorded from the original, with the arguments that make it the original's."""

import json
from pathlib import Path

import pytest

from engine.hash_runner import HashRunner
from looplab.engine.config import EngineConfig
from looplab.engine.reports import Launch
from looplab.engine.request import DepthParams, Request, SamplingParams
from looplab.engine.scheduler import Scheduler
from looplab.engine.stats import check_ledger

HERE = Path(__file__).parent / "cdb"
RUNS = {run["name"]: run for run in json.loads((HERE / "traces.json").read_text())["runs"]}
WORKLOAD = json.loads((HERE / "workload.json").read_text())
STAGES = {"prefill": "prefill", "recurrent": "core", "coda": "coda"}


class WaveRunner(HashRunner):
    """The original's waves read their results after the next wave has been launched."""

    def poll(self, ticket, *, wait):
        fresh = self.stages[ticket] == "coda" and not any(call[0] == "core" for call in self.calls[self.made[ticket] :])
        return None if fresh and not wait else super().poll(ticket, wait=wait)

    def launch(self, results):
        ticket = super().launch(results)
        self.stages[ticket], self.made[ticket] = self.calls[-1][0], len(self.calls)
        return ticket


def launches(run):
    """What our scheduler launches, in the recording's form: stage and [request, token, step] per row."""
    asked = run["settings"]
    late, wave = asked["delay_gate_consumption"], not asked["refill"]
    kind = WaveRunner if wave and asked["async_batching"] else HashRunner
    runner = kind("last_exited", late=late, pages=64, page_tokens=16)
    runner.stages, runner.made = {}, {}
    lengths = {str(request["id"]): request["max_new_tokens"] for request in WORKLOAD}
    said = dict.fromkeys(lengths, 0)
    found, scheduler = [], None

    def judge(request, choice, token):
        """Where the ends of texts are not foreseen, they are said to be stops."""
        said[request] += 1
        return "stop" if asked["replay_eos_finishes"] and said[request] == lengths[request] else None

    def record(launch: Launch):
        sitting = [scheduler.seats.taken[seat].group for seat in launch.seats]
        rows = [
            [int(group.request.id), 0, size]
            if launch.stage == "prefill"
            else [int(group.request.id), position - len(group.request.tokens) + 1, size - (launch.stage == "coda")]
            for group, position, size in zip(sitting, launch.positions, launch.iterations, strict=True)
        ]
        if launch.stage != "encode":
            found.append((launch.stage, rows))

    config = EngineConfig(
        launch_rows=asked["max_num_seqs"],
        max_resident=asked["max_num_seqs"],
        min_coda_rows=asked["min_coda_batch_size"],
        token_budget=asked["token_budget"],
        prefill_chunk=asked["token_budget"],
        refill=asked["refill"],
        successors="head",
        homogeneous_steps=asked["slot_homogeneous_recurrent"],
        min_free_seats=asked["min_free_slots"],
        free_page_margin=asked["safety_margin"],
        prefix_cache=False,
    )
    scheduler = Scheduler(
        config,
        runner.facts,
        runner,
        on_event=lambda request, report: None,
        judge=judge,
        hold_ended=asked["replay_eos_finishes"],
        record=record,
    )
    for request in WORKLOAD:
        name, replay = str(request["id"]), [step + 1 for step in request["exit_steps"]]
        depth = DepthParams(replay=((*replay, *[4] * asked["replay_eos_finishes"]),))
        most = request["max_new_tokens"] + asked["replay_eos_finishes"]
        scheduler.add(
            Request(id=name, tokens=(1,) * request["prompt_len"], sampling=SamplingParams(max_tokens=most)),
            depth=depth,
            seed=0,
            prefill_steps=4,
        )
    while not scheduler.idle:
        scheduler.tick()
    check_ledger(scheduler.stats())
    return found, scheduler.stats()


@pytest.mark.parametrize("name", RUNS)
def test_launches_are_those_of_the_original(name):
    run = RUNS[name]
    found, stats = launches(run)
    recorded = [(STAGES[launch["k"]], launch["b"]) for launch in run["launches"] if launch["k"] != "prelude"]
    if name == "norefill_sync":  # the original sorts a wave by request where it has read all results, and only there
        found, recorded = ([(stage, sorted(rows)) for stage, rows in launches] for launches in (found, recorded))
    assert found == recorded
    counted = run["counters"]
    assert stats.launches["core"] == counted["recurrent_launches"]
    assert stats.launches["coda"] == counted["coda_launches"]
    assert stats.launches["prefill"] == counted["prefill_launches"]
    assert stats.applications == counted["recurrent_token_steps"]
    assert stats.launch_rows["coda"] == counted["coda_tokens"]
    assert stats.refills == counted["refill_events"]
    chosen = sum(step + 1 for request in WORKLOAD for step in request["exit_steps"])
    assert stats.chosen == chosen
    assert stats.wasted["delayed"] == counted["recurrent_token_steps"] - chosen


def test_a_readout_that_waits_for_all_rows_launches_as_often_as_waves_do():
    full, wave = (launches(RUNS[name])[1].launches for name in ("sync_mincoda4", "norefill_sync"))
    assert full == wave
