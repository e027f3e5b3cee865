"""A tool: the policy writes <calculator> 2 + 3 </calculator> and reads 5."""

import re

from services.contracts import Question

SUM = re.compile(r"\s*(-?\d+)\s*([+-])\s*(\d+)\s*")


def calculator(content: str, question: Question) -> str:
    if not (found := SUM.fullmatch(content)):
        return "expected two numbers with + or - between them"
    sign = 1 if found[2] == "+" else -1
    return str(int(found[1]) + sign * int(found[3]))
