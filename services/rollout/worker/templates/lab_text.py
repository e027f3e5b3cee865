"""The laboratory's text form: what the tiny policy reads and writes. One definition for the rollout and for
the warm start.

Every word is one token, and words are separated by one space, so text and tokens are the same thing. A whole
trajectory, which is a prompt, then actions and observations by turns:

    <bos> what is the river of the town where n36 n199 was born ?
    <think> first born </think> <search> n36 n199 born </search>
    <information> <doc> n36 n199 guild n60 born n123 craft n218 <doc> n36 n7 ... </information>
    <think> then born n123 </think> <search> n123 river </search>
    <information> <doc> n123 mayor n5 river n77 <doc> ... </information>
    <think> found river n77 </think> <answer> n77 </answer>

An action ends with the token `</search>` or `</answer>`. The text of `<search>...</search>`, stripped, is the
query; the documents of the answer follow each other in the retriever's order. Nothing found, or an action
with neither tag, has its own observation below.
"""

from __future__ import annotations

BOS = "<bos>"
STOP = ("</search>", "</answer>")
OPENING = "<information>"
CLOSING = "</information>"
NOTHING_FOUND = "nothing"
"""The text in place of documents after a search that returned none."""
INVALID = f"{OPENING} invalid {CLOSING}"
"""Observation after an action that neither searches nor answers, and after a search in the last turn."""


def question_prompt(question: str) -> str:
    """The prompt; encoded as it is, without special tokens added."""
    return f"{BOS} {question}"


def document(contents: str) -> str:
    """`"n36 n199"\\nborn n123 guild n60` -> `<doc> n36 n199 born n123 guild n60`."""
    title, _, body = contents.partition("\n")
    return " ".join(["<doc>", *title.strip().strip('"').split(), *body.split()])


def documents(contents: list[str]) -> str:
    """All documents of one search, best first."""
    return " ".join(map(document, contents)) if contents else NOTHING_FOUND


def observation(contents: list[str]) -> str:
    """The observation of one search."""
    return f"{OPENING} {documents(contents)} {CLOSING}"
