import pytest

from looplab.report import write_report
from looplab.report.plates import plates
from report.sample import single_core


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_the_folder_holds_page_tables_and_every_figure_and_repeats_byte_for_byte(tmp_path):
    page = write_report(single_core(), tmp_path / "one")
    write_report(single_core(), tmp_path / "two")
    assert page == tmp_path / "one" / "report.html"
    found = contents(tmp_path / "one")
    names = {f"figures/{name}.{kind}" for name in plates(single_core()) for kind in ("svg", "pdf")}
    assert set(found) == names | {"report.html", "tables.tex", "depth_card.md", "depth_card.json"}
    assert found == contents(tmp_path / "two")
