"""Graders of the ``math``, ``regex`` and ``json_schema`` rewards, each of which may run long on a hostile response."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from mopd.rewards.graders.programs import Judged, last_block

NUMBER, MARKED = re.compile(r"[-+\d.,/ %]+"), re.compile(r"\$|\\boxed|\\\[|\\\(")
"""Forms of ground truths that math-verify reads as they are (``MARKED``: LaTeX with its marks); others are LaTeX
without the marks that it looks for."""
BOX, SENTENCE_END = re.compile(r"\\boxed\s*\{"), re.compile(r"\n|[.!?]\$?\s")
MAX_RESPONSE = 20_000
"""Last characters of a response in which an expression is looked for."""


def prepare_math() -> None:
    """Import math-verify and have it build its parsers, once for all items."""
    logging.disable(logging.WARNING)  # it warns that it sets no timers, though told so
    grade_math({"response": r"\boxed{\frac{1}{2}}", "truth": "0.5"})


def grade_math(call: dict[str, Any]) -> Judged:
    """Return value 1 if an expression of the response equals the ground truth."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    ways = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    truth = _final(call["truth"])
    in_math = truth if NUMBER.fullmatch(truth) or MARKED.search(truth) else f"${truth}$"
    found = parse(_final(call["response"][-MAX_RESPONSE:]), extraction_config=ways, parsing_timeout=None)
    if not found:
        return 0.0, None, "it holds no expression that math-verify reads"
    gold = parse(in_math, extraction_config=ways, parsing_timeout=None) or [truth]
    equal = verify(gold, found, timeout_seconds=None)
    return float(equal), str(found[-1]), "" if equal else "another answer than the ground truth"


def _final(text: str) -> str:
    """Return the part that holds the answer: from the sentence or line of the last box on; without a box what follows
    the last ``####``, as GSM8K writes it; else the whole text. math-verify alone would take all boxes for one answer.
    """
    boxes = [match.start() for match in BOX.finditer(text)]
    if not boxes:
        after = text.rpartition("####")[2].strip()
        return after or text
    if len(boxes) == 1:
        return text
    ends = [match.end() for match in SENTENCE_END.finditer(text, 0, boxes[-1])]
    return text[max(ends, default=0) :]


def grade_regex(call: dict[str, Any], pattern: re.Pattern[str]) -> Judged:
    """Return value 1 if the last match's group is the ground truth; without a group, if there is a match."""
    found: str | None = None
    for match in pattern.finditer(call["response"]):
        found = match[pattern.groups]
        if not pattern.groups:
            break
    if found is None:
        return 0.0, None, "the pattern does not match"
    if not pattern.groups:
        return 1.0, found, ""
    equal = found.strip() == call["truth"]
    return float(equal), found, "" if equal else "another answer than the ground truth"


def grade_json(call: dict[str, Any], schema: Any) -> Judged:
    """Return value 1 if the schema allows the JSON of the response. References lead nowhere but into the schema."""
    from jsonschema import ValidationError
    from jsonschema.validators import validator_for
    from referencing import Registry

    text = last_block(call["response"], ("json", ""))
    text = call["response"].strip() if text is None else text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return 0.0, None, f"it is no JSON ({str(error)[:200]})"
    schema = schema if schema is not None else call["truth"]
    try:
        validator_for(schema)(schema, registry=Registry()).validate(value)
    except ValidationError as error:
        return 0.0, text, f"the schema refuses it at {error.json_path}: {error.message[:200]}"
    return 1.0, text, ""


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
