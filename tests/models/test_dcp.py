from looplab.models.base import PRESETS, build
from looplab.recurrence.depth import PrefixDepth, UniformDepth
from looplab.recurrence.plan import Plan


def test_the_preset_has_the_counted_parameters_in_every_group():
    spec = build(PRESETS["dcp-90m"](), device="meta").spec
    layer, gate, table = 4_424_960, 204_961, 4 * 640
    assert spec.params.total == 65_145_922
    assert spec.params.embedding == 32_000 * 640
    assert spec.params.core == (layer + gate + table,) * 2
    assert spec.params.prelude == 8 * layer + 640
    assert (spec.params.readout, spec.params.head) == (640, 0)


def test_the_plan_and_the_state_are_those_of_the_grid():
    for name in ("dcp-90m", "tiny-dcp"):
        spec = build(PRESETS[name](), device="meta").spec
        assert spec.plan() == Plan.of((block, t) for block in range(2) for t in range(4))
        assert spec.trained_depth == PrefixDepth(law=UniformDepth(low=1, high=8))
        assert {field: part.read_by_coda for field, part in spec.state.items()} == {"state": True, "energy": False}
        assert spec.index_parts == {"embedding"} and spec.max_iteration == 4
