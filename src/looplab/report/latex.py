r"""tables.tex: the tables a paper quotes, for `\usepackage{booktabs}`; rounded as on the page."""

from looplab.audit.result import AuditResult
from looplab.report import measured, orders
from looplab.report.depth_table import depth_value_table
from looplab.report.escape import escape
from looplab.report.keyed import Keyed
from looplab.report.tables import Cell, Table


def tables_tex(result: AuditResult) -> str:
    """The text of tables.tex: value of depth, answers, decomposition, orders, probes, factorial and dense control."""
    found = [table for domain in Keyed(result).domains for table in _quoted(domain)]
    head = (
        f"% Audit of {_one_line(result.model.name)}, settings {result.config_hash}. Needs \\usepackage{{booktabs}}.\n"
    )
    return head + "\n".join(render(table) for table in found)


def _quoted(domain: Keyed) -> list[Table]:
    tables = [depth_value_table(domain), *filter(None, [measured.answers(domain)])]
    tables += [measured.decomposition(domain)] if domain.decompositions else []
    tables += [orders.four_way(domain), measured.gains(domain), orders.effects(domain)]
    if domain.held.control is not None:
        tables.append(measured.comparisons(domain))
        tables.append(
            measured.gains(
                domain.control, "dense-probes", f"Refitted readouts of the dense control on {domain.held.name}, nats"
            )
        )
    return [table for table in tables if table.rows]


def render(table: Table) -> str:
    """One table environment."""
    align = "".join("l" if i in table.text_columns else "r" for i in range(len(table.columns)))
    lines = [" & ".join(escape(_entry(cell)) for cell in row) + r" \\" for row in table.rows]
    caption = escape(f"{table.caption}. {table.note}".strip())
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            " & ".join(escape(column) for column in table.columns) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _entry(cell: Cell) -> str:
    return f"{cell.text} ({cell.under})" if cell.under else cell.text


def _one_line(text: str) -> str:
    return " ".join(text.split())
