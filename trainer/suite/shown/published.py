"""Exact match as two papers print it, to set beside one's own results and to check the averages by.

Not measured here, and not comparable where the protocol differs (docs/evaluation.md). LLDS: arXiv 2512.04220
v2, tables 1 and 2. Search-R1: arXiv 2503.09516 v5, tables 2 and 5 (its own GRPO rows, of table 3, are those
that the paper on LLDS quotes).
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.suite.sets import SETS

LLDS = "arXiv 2512.04220 v2"
SEARCH_R1 = "arXiv 2503.09516 v5"


class Printed(NamedTuple):
    """One row of a table. Averages that a paper does not print are None."""

    paper: str
    model: str
    method: str
    em: tuple[float, ...]
    """In the order of SETS."""
    general: float | None
    multi_hop: float | None
    macro: float

    @property
    def by_set(self) -> dict[str, float]:
        return dict(zip(SETS, self.em, strict=True))


def _llds(model: str, method: str, numbers: str) -> Printed:
    """numbers: the ten columns as they are printed, averages where the paper has them."""
    nq, trivia, pop, general, hotpot, wiki, musique, bamboogle, multi_hop, macro = map(float, numbers.split())
    em = (nq, trivia, pop, hotpot, wiki, musique, bamboogle)
    return Printed(LLDS, model, method, em, general, multi_hop, macro)


def _search_r1(model: str, method: str, numbers: str) -> Printed:
    *em, macro = map(float, numbers.split())
    return Printed(SEARCH_R1, model, method, tuple(em), None, None, macro)


PUBLISHED = (
    _search_r1("Qwen2.5-3B", "direct inference", ".106 .288 .108 .149 .244 .020 .024 .134"),
    _search_r1("Qwen2.5-3B", "CoT", ".023 .032 .005 .021 .021 .002 .000 .015"),
    _search_r1("Qwen2.5-3B", "IRCoT", ".111 .312 .200 .164 .171 .067 .240 .181"),
    _search_r1("Qwen2.5-3B", "Search-o1", ".238 .472 .262 .221 .218 .054 .320 .255"),
    _search_r1("Qwen2.5-3B", "RAG", ".348 .544 .387 .255 .226 .047 .080 .270"),
    _search_r1("Qwen2.5-3B", "SFT", ".249 .292 .104 .186 .248 .044 .112 .176"),
    _search_r1("Qwen2.5-3B-Base", "R1 (no search)", ".226 .455 .173 .201 .268 .055 .224 .229"),
    _search_r1("Qwen2.5-3B-Instruct", "R1 (no search)", ".210 .449 .171 .208 .275 .060 .192 .224"),
    _search_r1("Qwen2.5-3B", "rejection sampling", ".294 .488 .332 .240 .233 .059 .210 .265"),
    _search_r1("Qwen2.5-3B-Base", "Search-R1 PPO", ".406 .587 .435 .284 .273 .049 .088 .303"),
    _search_r1("Qwen2.5-3B-Instruct", "Search-R1 PPO", ".341 .545 .378 .324 .319 .103 .264 .325"),
    _search_r1("Qwen2.5-7B", "direct inference", ".134 .408 .140 .183 .250 .031 .120 .181"),
    _search_r1("Qwen2.5-7B", "CoT", ".048 .185 .054 .092 .111 .022 .232 .106"),
    _search_r1("Qwen2.5-7B", "IRCoT", ".224 .478 .301 .133 .149 .072 .224 .239"),
    _search_r1("Qwen2.5-7B", "Search-o1", ".151 .443 .131 .187 .176 .058 .296 .206"),
    _search_r1("Qwen2.5-7B", "RAG", ".349 .585 .392 .299 .235 .058 .208 .304"),
    _search_r1("Qwen2.5-7B", "SFT", ".318 .354 .121 .217 .259 .066 .112 .207"),
    _search_r1("Qwen2.5-7B-Base", "R1 (no search)", ".297 .539 .202 .242 .273 .083 .296 .276"),
    _search_r1("Qwen2.5-7B-Instruct", "R1 (no search)", ".270 .537 .199 .237 .292 .072 .293 .271"),
    _search_r1("Qwen2.5-7B", "rejection sampling", ".360 .592 .380 .331 .296 .123 .355 .348"),
    _search_r1("Qwen2.5-7B-Base", "Search-R1 PPO", ".480 .638 .457 .433 .382 .196 .432 .431"),
    _search_r1("Qwen2.5-7B-Instruct", "Search-R1 PPO", ".393 .610 .397 .370 .414 .146 .368 .385"),
    _search_r1("Qwen2.5-14B", "direct inference", ".198 .531 .184 .217 .253 .045 .160 .227"),
    _search_r1("Qwen2.5-14B", "CoT", ".190 .495 .148 .269 .297 .054 .432 .269"),
    _search_r1("Qwen2.5-14B", "IRCoT", ".114 .375 .166 .230 .248 .102 .312 .221"),
    _search_r1("Qwen2.5-14B", "Search-o1", ".347 .635 .241 .268 .161 .099 .416 .310"),
    _search_r1("Qwen2.5-14B", "RAG", ".327 .585 .376 .279 .160 .051 .192 .281"),
    _search_r1("Qwen2.5-14B", "SFT", ".361 .467 .150 .248 .278 .089 .160 .250"),
    _search_r1("Qwen2.5-14B-Base", "R1 (no search)", ".369 .626 .270 .306 .326 .117 .488 .357"),
    _search_r1("Qwen2.5-14B-Instruct", "R1 (no search)", ".334 .628 .253 .294 .325 .108 .432 .339"),
    _search_r1("Qwen2.5-14B-Base", "Search-R1 PPO", ".486 .676 .480 .468 .470 .241 .528 .479"),
    _search_r1("Qwen2.5-14B-Instruct", "Search-R1 PPO", ".424 .660 .442 .436 .379 .210 .480 .433"),
    _llds("Qwen2.5-3B-Base", "GRPO", ".421 .583 .413 .472 .297 .274 .066 .128 .191 .312"),
    _llds("Qwen2.5-3B-Base", "GRPO + LLDS", ".479 .627 .453 .520 .345 .323 .082 .210 .240 .360"),
    _llds("Qwen2.5-3B-Base", "GRPO + LLDS-MA", ".483 .633 .474 .530 .452 .443 .197 .395 .372 .440"),
    _llds("Qwen2.5-3B-Instruct", "GRPO", ".397 .565 .391 .451 .331 .310 .124 .232 .249 .336"),
    _llds("Qwen2.5-3B-Instruct", "GRPO + LLDS", ".462 .627 .468 .519 .443 .447 .197 .444 .383 .441"),
    _llds("Qwen2.5-3B-Instruct", "GSPO", ".376 .561 .374 .437 .332 .329 .098 .250 .252 .331"),
    _llds("Qwen2.5-3B-Instruct", "GSPO + LLDS", ".489 .640 .483 .537 .466 .456 .215 .403 .385 .451"),
    _llds("Qwen2.5-7B-Base", "GRPO", ".395 .560 .388 .448 .326 .297 .125 .360 .277 .350"),
    _llds("Qwen2.5-7B-Base", "GRPO + LLDS", ".512 .672 .480 .555 .486 .469 .232 .508 .424 .480"),
    _llds("Qwen2.5-7B-Instruct", "GRPO", ".429 .623 .427 .493 .386 .346 .162 .400 .324 .396"),
    _llds("Qwen2.5-7B-Instruct", "GRPO + LLDS", ".518 .676 .486 .560 .492 .490 .228 .492 .426 .483"),
)
