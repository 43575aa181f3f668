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
page        report.html
folder      all of it, written: `write_report`
"""

from looplab.report.comparison import write_comparison
from looplab.report.folder import write_report
from looplab.report.page import audit_page

__all__ = ["audit_page", "write_comparison", "write_report"]
