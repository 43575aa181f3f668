"""What an audit tells its watcher, in which order."""

from looplab.audit.config import AuditConfig
from looplab.audit.protocol import plan_audit
from looplab.audit.watch import PHASES, Silent, Watcher
from tiny import LetterTokenizer, Mixing, TinyDense, letters


class Notes(Watcher):
    def __init__(self):
        self.told = []

    def planned(self, card, rows, minimal, naive):
        self.told.append(("planned", card.name, len(rows), minimal, naive))

    def tested(self, test):
        self.told.append(("tested", test.name))

    def advanced(self, phase, domain, done, total, schedule):
        self.told.append((phase, domain))


def plan():
    config = AuditConfig(replicates=1000, probes=("temperature",), grid=(1,), controls=())
    return plan_audit(
        Mixing(blocks=1, indexed=False).eval(), letters(60), config, tokenizer=LetterTokenizer(), control=TinyDense(3)
    )


def test_the_plan_comes_first_then_tests_then_phases_in_order():
    notes = Notes()
    plan().run(watcher=notes)
    assert notes.told[0] == ("planned", "tiny", 3, 4, 9)
    assert notes.told[1:10] == [("tested", f"T{i}") for i in range(1, 10)]
    phases = list(dict.fromkeys(phase for phase, *_ in notes.told[10:]))
    assert phases == list(PHASES[1:-1])  # the report is the command's


def test_a_silent_watcher_prints_nothing(capsys):
    plan().run(watcher=Silent())
    assert capsys.readouterr() == ("", "")
