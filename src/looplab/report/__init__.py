"""Reports: pages, tables and figures out of results. Nothing here runs a model.

keyed       values that know their path in results.json
tables      cells and tables as data
measured    tables of what was measured
provenance  tables of what was run and how
answer      the band at the top of the page
beside      other audits on the same page
comparison  several audits on a page of their own: `write_comparison`
figures     one file per figure
plates      which figures a result has
latex       tables.tex
study       the page of a study
claims      the claims of many studies in one table, without PyTorch
page        report.html
folder      all of it, written: `write_report`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looplab.report.comparison import write_comparison
    from looplab.report.folder import write_report
    from looplab.report.page import audit_page

_HOMES = {"audit_page": "page", "write_comparison": "comparison", "write_report": "folder"}
__all__ = ["audit_page", "write_comparison", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
