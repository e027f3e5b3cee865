"""A retriever: passages by the number of words that they share with the query."""

PASSAGES = {"n1": "n1 is the river of n2", "n3": "n3 is born where n4 is", "n5": "n5 is nothing"}


def search(query: str, topk: int) -> list[tuple[str, float]]:
    words = set(query.split())
    scores = {title: float(len(words & {title, *text.split()})) for title, text in PASSAGES.items()}
    best = sorted(PASSAGES, key=lambda title: -scores[title])[:topk]
    return [(f"{title}\n{PASSAGES[title]}", scores[title]) for title in best]
