"""One audit per folder, one process at a time."""

import json
import os
import re
import subprocess
import sys

import pytest

from looplab.audit.folder import AuditFolder, FolderBusyError

SETTINGS = {
    "seed": 0, "documents": 200, "probes": ["temperature"], "grid": [1, 2], "model": "a" * 32, "data.text": "d" * 32,
    "torch": "2.13.0", "threads": 1,
}  # fmt: skip
SCOPE = {"schedules": ["full", "prefix(1)"], "domains": ["text"]}


def exactly(message):
    return f"^{re.escape(message)}$"


def test_the_manifest_is_written_first(tmp_path):
    with AuditFolder(tmp_path / "out") as folder:
        assert folder.claim(SETTINGS, SCOPE, {"command": "looplab"}) is None
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert written == {"kind": "audit", "settings": SETTINGS, "scope": SCOPE, "command": "looplab"}


def test_the_same_settings_may_claim_the_folder_again(tmp_path):
    for _ in range(2):
        with AuditFolder(tmp_path) as folder:
            assert folder.claim(SETTINGS, SCOPE, {}) is None


def test_other_settings_are_refused_with_every_difference(tmp_path):
    with AuditFolder(tmp_path) as folder:
        folder.claim(SETTINGS, SCOPE, {})
        changed = {**SETTINGS, "seed": 1, "documents": 50, "probes": ["temperature", "affine"], "model": "b" * 32}
        message = (
            f"{tmp_path} holds an audit with other settings (seed 0 -> 1, documents 200 -> 50, "
            "probes temperature -> temperature,affine, model aaaaaaaa -> bbbbbbbb). Use another --out or --fresh."
        )
        with pytest.raises(FolderBusyError, match=exactly(message)):
            folder.claim(changed, SCOPE, {})


def test_more_schedules_and_more_domains_follow_on_the_same_folder(tmp_path):
    more = {"schedules": ["full", "prefix(1)", "same(3)"], "domains": ["text", "web"]}
    grown = {**SETTINGS, "grid": [1, 2, 4], "schedules": ["same(3)"], "data.web": "e" * 32}
    with AuditFolder(tmp_path) as folder:
        folder.claim(SETTINGS, SCOPE, {})
        (tmp_path / "results.json").write_text("of the smaller audit")
        assert folder.claim(grown, more, {}) is None
        assert not (tmp_path / "results.json").exists()
        with pytest.raises(FolderBusyError, match=r"data.web e+ -> None"):
            folder.claim(SETTINGS, SCOPE, {})


def test_other_documents_of_a_known_domain_are_refused(tmp_path):
    with AuditFolder(tmp_path) as folder:
        folder.claim(SETTINGS, SCOPE, {})
        with pytest.raises(FolderBusyError, match=r"\(data.text dddddddd -> eeeeeeee\)"):
            folder.claim({**SETTINGS, "data.text": "e" * 32}, SCOPE, {})


def test_an_unfinished_audit_goes_on_only_under_the_same_threads(tmp_path):
    with AuditFolder(tmp_path) as folder:
        folder.claim(SETTINGS, SCOPE, {})
        message = (
            f"{tmp_path} holds an audit with other settings (threads 1 -> 2). "
            "Set OMP_NUM_THREADS=1, use another --out or --fresh."
        )
        with pytest.raises(FolderBusyError, match=exactly(message)):
            folder.claim({**SETTINGS, "threads": 2}, SCOPE, {})


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    with AuditFolder(tmp_path) as folder:
        folder.claim(SETTINGS, SCOPE, {})
        torn = tmp_path / "partial" / "model" / ".full.safetensors.17.partial"
        torn.parent.mkdir(parents=True)
        torn.write_bytes(b"half")
        (tmp_path / ".tables.17").mkdir()
        (tmp_path / ".report.html.17.partial").write_text("half")
        folder.claim(SETTINGS, SCOPE, {})
        assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "manifest.json", "model", "partial"]


def test_fresh_removes_what_the_other_audit_left_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "F1.svg").write_text("old")
    (tmp_path / "results.json").write_text("old")
    with AuditFolder(tmp_path) as folder:
        folder.claim(SETTINGS, SCOPE, {})
        assert folder.claim({**SETTINGS, "seed": 1}, SCOPE, {}, fresh=True) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "manifest.json", "notes.txt"]
    assert json.loads((tmp_path / "manifest.json").read_text())["settings"]["seed"] == 1


def test_a_folder_of_another_run_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"kind": "training"}')
    with AuditFolder(tmp_path) as folder, pytest.raises(FolderBusyError, match=r"holds another run \(training\)"):
        folder.claim(SETTINGS, SCOPE, {})


def test_a_second_process_is_refused_with_the_number_of_the_first(tmp_path):
    script = (
        "import sys; from pathlib import Path; from looplab.audit.folder import AuditFolder\n"
        "with AuditFolder(Path(sys.argv[1])): pass\n"
    )
    with AuditFolder(tmp_path):
        other = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert other.returncode != 0
    assert f"{tmp_path} is in use by process {os.getpid()}. Wait or choose another --out." in other.stderr
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == 0


def test_a_file_or_a_training_run_in_the_way_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    message = f"{tmp_path / 'file'} must be a folder. Got a file. Choose another --out."
    with pytest.raises(FolderBusyError, match=exactly(message)), AuditFolder(tmp_path / "file"):
        pass
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    message = f"{run} holds another run (training). Use another --out."
    with pytest.raises(FolderBusyError, match=exactly(message)), AuditFolder(run):
        pass
    assert [path.name for path in run.iterdir()] == ["run.json"]
