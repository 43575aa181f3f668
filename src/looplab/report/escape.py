"""Text that LaTeX prints as it is."""

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
NBSP = "\N{NO-BREAK SPACE}"
ESCAPES = {letter: "\\" + letter for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    MINUS: "$-$",
    NONE: "--",
    NBSP: "~",
    "±": r"$\pm$",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
}


def escape(text: str) -> str:
    """The text with every special character written out."""
    return "".join(ESCAPES.get(letter, letter) for letter in text)
