"""`index build` says where BM25 takes whole phrases for words."""

import json

import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.index_folder.remarks import unspaced

JAPANESE = "東京タワーは高さ三百三十三メートルの塔である。"
THAI = "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"


def corpus(folder, *texts, column="text"):
    file = folder / "c.jsonl"
    file.write_text("".join(json.dumps({"id": str(n), column: text}) + "\n" for n, text in enumerate(texts)))
    return file


@pytest.mark.parametrize("text", [JAPANESE, THAI, f"Tokyo Tower: {JAPANESE}"])
def test_text_whose_words_stand_side_by_side_is_told(tmp_path, text):
    line = unspaced(corpus(tmp_path, "A bridge.", text, text))
    assert line is not None and "c.jsonl: its text has no spaces between words, so BM25 takes" in line
    assert unspaced(corpus(tmp_path, text, column="Story"), CorpusKeys(text="Story")) == line


@pytest.mark.parametrize(
    "texts",
    [
        ("A bridge over the river.",),
        ("Москва стоит на реке.", "القاهرة عاصمة مصر", "서울은 대한민국의 수도이다"),
        ("東京 タワー は 高さ 三百 メートル の 塔 で ある",),
        (f"{'The tower of Tokyo has a Japanese name. ' * 5}{JAPANESE}",),
        (),
    ],
    ids=["English", "Russian, Arabic, Korean", "set apart", "a name in English", "empty"],
)
def test_text_with_words_set_apart_is_not(tmp_path, texts):
    assert unspaced(corpus(tmp_path, *texts)) is None


def test_the_command_says_it_of_bm25(run, tmp_path):
    status, out, err = run("index", "build", str(corpus(tmp_path, JAPANESE)), "--out", str(tmp_path / "i"))
    assert status == 0 and err.count("--backend dense searches such text") == 1, out + err
