from looplab.report.escape import escape


def test_special_characters_are_written_out():
    assert escape("50 % of a_b & {c} \\ ~ ^ <1>") == (
        r"50 \% of a\_b \& \{c\} \textbackslash{} \textasciitilde{} \textasciicircum{} \textless{}1\textgreater{}"
    )
    assert escape("\N{MINUS SIGN}1 ± “x”") == "$-$1 $\\pm$ ``x''"
