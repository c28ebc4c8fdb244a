"""The demo model's training data: texts, tokenizer, conversations, batches, archives."""

import io
import json
import lzma
import pathlib
import random
import re
import tarfile
import zipfile
from collections import Counter

import numpy as np
import pytest
import tools.demo
from tools.demo import (
    books,
    chores,
    clean,
    corpora,
    data,
    dialogues,
    fetch,
    generated,
    needles,
    sources,
)
from tools.demo import tokenizer as demo_tokenizer
from tools.demo.chats import example
from tools.demo.markup import html_text
from tools.demo.sources import Source

from twinspark.evals.case import Case, Step
from twinspark.evals.tasks.draw import THINKING
from twinspark.evals.tasks.examples import turns
from twinspark.text.fields import FEATURES
from twinspark.text.template import render_request
from twinspark.text.tokenizer import BOS, DSML, EOS, THINK, Tokenizer

ROOT = pathlib.Path(tools.demo.__file__).parents[2]
ARROW = "\u2192"


def corpus():
    """This project's own sources: enough text for a vocabulary of 4096."""
    for folder in ("src/twinspark/text", "src/twinspark/evals", "tools/demo", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md"):
                yield path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    demo_tokenizer.save(demo_tokenizer.train(corpus(), vocab_size=4096), str(path))
    return path


@pytest.fixture(scope="module")
def model(vocabulary):
    return Tokenizer.from_file(vocabulary)


# --- sources and archives ---


def test_every_source_is_pinned_and_free():
    known = sources.load()
    assert len({(s.registry, s.package) for s in known}) == len(known)
    for source in known:
        assert re.fullmatch("[0-9a-f]{64}", source.sha256), source.package
        assert source.take in corpora.READERS, source.package
        assert not re.search(r"GPL|GFDL|CC-BY|SSPL|MPL|NC", source.licence), source.package
    assert sum(source.heldout for source in known) >= 3


def test_the_notice_lists_every_source_under_its_licence():
    """`python -m tools.demo.sources` prints the lines to put there."""
    assert sources.by_licence(sources.load()) in (ROOT / "NOTICE").read_text(encoding="utf-8")


def test_the_table_is_written_as_it_is_read(tmp_path):
    path = tmp_path / "table.toml"
    known = sources.load()
    sources.dump(known, path)
    assert sources.load(path) == known
    assert path.read_text() == sources.TABLE.read_text()


def test_an_unknown_key_of_the_table_is_named(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text('[pypi]\n"a" = { version = "1", licence = "MIT", take = "project", x = 1 }\n')
    with pytest.raises(ValueError, match=r"pypi\.a: .*'x'"):
        sources.load(path)


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def tar_bytes(files, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def debian(path, files):
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": b""}
    parts["data.tar.xz"] = lzma.compress(tar_bytes(files, "w"))
    raw = b"!<arch>\n"
    for name, content in parts.items():
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        raw += content + b"\n" * (len(content) % 2)
    path.write_bytes(raw)
    return path


def test_archives_of_every_registry_are_read_in_the_order_of_names(tmp_path):
    files = {"b/two.py": "2", "a/one.py": "1"}
    npm = tmp_path / "x.tgz"
    npm.write_bytes(tar_bytes(files, "w:gz"))
    for archive in (wheel(tmp_path / "x.whl", files), npm, debian(tmp_path / "x.deb", files)):
        assert list(sources.members(archive)) == [("a/one.py", b"1"), ("b/two.py", b"2")]
    with pytest.raises(ValueError, match="expected a .whl"):
        list(sources.members(tmp_path / "x.rpm"))


def client(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_fetching_checks_digests_and_skips_what_is_here(tmp_path, monkeypatch, capsys):
    tools_folder = tmp_path / "clients"
    tools_folder.mkdir()
    client(tools_folder, "npm", "echo called >> $CALLS; printf content > thing-1.0.tgz")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", str(tools_folder), prepend=":")
    table, demo = tmp_path / "table.toml", tmp_path / "demo"
    new = Source(package="thing", registry="npm", version="1.0", licence="MIT", take="project")
    sources.dump([new], table)
    with pytest.raises(SystemExit, match="--pin"):
        fetch.fetch(demo, table)
    fetch.fetch(demo, table, pin=True)
    (pinned,) = sources.load(table)
    assert pinned.file == "thing-1.0.tgz" and fetch.is_here(pinned, demo / "archives")
    fetch.fetch(demo, table)
    assert (tmp_path / "calls").read_text() == "called\n"
    (demo / "archives" / pinned.file).write_text("other")
    client(tools_folder, "npm", "printf changed > thing-1.0.tgz")
    with pytest.raises(SystemExit, match="expected digest"):
        fetch.fetch(demo, table)
    assert "failed" in capsys.readouterr().out


def test_a_pinned_wheel_is_asked_for_by_its_platform():
    found = {s.package: s for s in sources.load()}
    call = fetch.command(found["numpy"])
    assert "--platform=manylinux_2_28_x86_64" in call and call[-1].startswith("numpy==")
    assert not any("platform" in word for word in fetch.command(found["django"]))


# --- documents ---

CODE = "def f(x):\n    return [x, x + 1]\n" * 12


def test_licence_headers_are_cut_off_and_other_comments_stay():
    header = "# Copyright 2020 Somebody\n# Licensed under the MIT License.\n\n"
    assert clean.trimmed(header + CODE, "code") == CODE
    assert clean.trimmed("/* (c) Somebody\n all rights reserved */\n" + CODE, "code") == CODE
    assert clean.trimmed("# About this file.\n" + CODE, "code").startswith("# About")
    assert clean.trimmed("a  \r\nb\r\n\n\n\n\n\nc", "docs") == "a\nb\n\n\nc\n"


@pytest.mark.parametrize(
    "text, why",
    [
        (CODE, ""),
        ("x = 1\n", "short"),
        ("# This file was generated by a tool. DO NOT EDIT\n" + CODE, "generated"),
        (CODE + "x = '" + "abc " * 200 + "'\n", "long lines"),
        ("table = [\n" + "    1.25, 3.5, 17, 0x1F, 22,\n" * 40 + "]\n", "few letters"),
        ("\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440\n" * 40, "not English"),
        (CODE + "mark = '<think>'\n", "markers"),
    ],
)
def test_bad_documents_are_left_out(text, why):
    assert clean.fault(text, "code") == why


def test_a_speech_may_be_one_long_line():
    speech = "We the people of this land have come a long way, and we go on. " * 120
    assert (clean.fault(speech, "prose"), clean.fault(speech, "docs")) == ("", "long lines")


def test_near_copies_are_left_out():
    lines = [f"line number {n} of this very document\n" for n in range(80)]
    seen = clean.Seen()
    assert not seen.is_copy("".join(lines))
    assert seen.is_copy(
        "".join([*lines[:70], *(f"another {n} line, quite long\n" for n in range(9))])
    )
    assert not seen.is_copy(
        "".join(f"nothing of {n} was there before, really\n" for n in range(80))
    )


def test_pages_become_light_markdown():
    page = (
        "<html><head><title>no</title></head><body><nav>menu</nav><h2>A  title</h2>"
        "<div class='sphinxsidebar'><p>aside</p></div><p>Some <code>code</code>,\n more.</p>"
        "<ul><li><p>one</p></li><li>two &amp; three</li></ul><pre>x = 1\n  y</pre></body></html>"
    )
    assert html_text(page) == (
        "## A title\n\nSome `code`, more.\n\n- one\n\n- two & three\n\n```\nx = 1\n  y\n```"
    )


def test_a_project_gives_code_and_documentation(tmp_path):
    archive = wheel(
        tmp_path / "p.whl",
        {
            "p/a.py": CODE,
            "p/tests/test_a.py": CODE.replace("f(", "g("),
            "p/copy.py": CODE,
            "p/guide.md": "Some words about this project, in plain English. " * 9,
            "p-1.dist-info/METADATA": "Name: p\n\n" + "The description of the project says. " * 10,
        },
    )
    source = Source(package="p", registry="pypi", version="1", licence="MIT", take="project")
    faults = Counter()
    found = corpora.documents(source, archive, clean.Seen(), faults)
    assert [(d.kind, d.name) for d in found] == [
        ("docs", "p/p-1.dist-info/METADATA/description"),
        ("code", "p/p/a.py"),
        ("docs", "p/p/guide.md"),
    ]
    assert faults["short"] == 0


def test_only_so_many_megabytes_are_taken_whatever_the_order(tmp_path):
    files = {f"p/{n}.py": CODE.replace("f(", f"f{n}(") + f"NAME = 'the name of {n}'\n" * 3
             for n in range(20)}  # fmt: skip
    archive = wheel(tmp_path / "p.whl", files)
    source = Source(
        package="p", registry="pypi", version="1", licence="MIT", take="project", most=0.002
    )
    taken = corpora._at_most(list(corpora.raw_documents(source, archive)), source.most)
    assert 0.0015 < sum(len(d.text) for d in taken) / 1e6 < 0.003
    assert [d.name for d in taken] == sorted(d.name for d in taken)


def test_dictionary_entries_and_country_profiles_are_readable():
    line = '00001740 03 n 02 big_thing 0 object(p) 0 001 @ 00001 n 0000 | a thing; "a big thing"'
    ((_, text),) = books.wordnet([("x/data.noun", f"  1 head\n{line}\n".encode())])
    assert text == 'big thing, object (noun): a thing; "a big thing"'
    names = {"conventional short form": {"text": "Norway"}}
    capital = {"name": {"text": "Oslo <b>city</b>"}}
    profile = {"Government": {"Capital": capital, "Country name": names}}
    files = [("x/data/no.json", json.dumps(profile).encode())]
    ((_, text),) = books.factbook(files)
    assert "# Government" in text and "- name: Oslo city" in text
    assert books.country_facts(files)["Norway"]["capital"] == "Oslo city"


# --- tokenizer ---


def test_special_tokens_keep_their_ids_and_digits_stand_alone(vocabulary, model):
    assert model.vocab_size == 4096
    assert (model.bos_id, model.eos_id, model.pad_id) == (0, 1, 2)
    assert [model.specials[t] for t, _, _ in demo_tokenizer.TAIL] == list(range(4079, 4096))
    ids = model.encode_plain("In 1995 it was 3.25, x12")
    texts = [model.token_text(i) for i in ids]
    assert [t for t in texts if any(c.isdigit() for c in t)] == list("199532512")
    digits = [i for i in range(model.vocab_size) if re.search(r"\d", model.token_text(i))]
    assert len(digits) == 10
    text = f"{CODE}\n{EOS} <think> naive caf\u00e9 {ARROW} done\n\n\n  end"
    assert model.decode(model.encode_plain(text)) == text


def test_texts_are_packed_as_the_server_encodes_plain_text(vocabulary, model):
    encoder = data.plain_encoder(vocabulary)
    for text in (CODE, f"some {THINK} {BOS}{DSML} in the text 12.5\n", "# t\n\n- a\n- b\n"):
        assert encoder.encode(text, add_special_tokens=False).ids == model.encode_plain(text)


# --- conversations ---


def all_cases(model):
    kinds = [*dialogues.KINDS, *chores.KINDS]
    yield from dialogues.dialogues(60, 5, kinds)
    for task, _ in generated.task_numbers():
        yield from task.cases(8, generated.SEEDS["train"], lambda t: len(model.encode_plain(t)))


def test_training_ids_are_what_the_server_encodes(model):
    """Byte for byte: each prompt that a server would render is the example's beginning."""
    checked = 0
    for case in all_cases(model):
        made = example(case, model)
        ids = made.ids.tolist()
        rendered = turns(case)
        for turn, (begin, end) in zip(rendered[-len(made.replies) :], made.replies, strict=True):
            assert ids[:begin] == turn.prompt.encode(model)
            reply = model.decode(ids[begin:end])
            assert reply == "".join(s.text for s in turn.reply) and reply.endswith(EOS)
            checked += 1
        assert ids[0] == 0 and ids[-1] == 1 and ids.count(0) == 1
        assert made.loss.sum() == sum(end - begin for begin, end in made.replies)
    assert checked > 100


def talk(*pairs, **fields):
    steps = tuple(
        Step(
            add=({"role": "user", "content": ask},),
            ideal={"role": "assistant", "content": say, "reasoning_content": "Hm."},
            judge=lambda answer: True,
        )
        for ask, say in pairs
    )
    return Case(label="x", steps=steps, fields={**THINKING, **fields})


def test_replies_whose_reasoning_is_left_out_later_are_no_targets(model):
    """With thinking on, the server drops old reasoning: only the last reply was ever written so."""
    made = example(talk(("One?", "First."), ("Two?", "Second."), reasoning_effort=40), model)
    assert len(made.replies) == 1
    (begin, end), ids = made.replies[0], made.ids.tolist()
    assert model.decode(ids[begin:end]) == "Hm.</think>Second." + EOS
    request = {
        **THINKING,
        "reasoning_effort": 40,
        "messages": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "First.", "reasoning_content": "Hm."},
            {"role": "user", "content": "Two?"},
        ],
    }
    assert render_request(request, serves=FEATURES).encode(model) == ids[:begin]


@pytest.fixture(scope="module")
def streams(vocabulary):
    rows = data.plain_encoder(vocabulary).encode_batch(list(corpus()), add_special_tokens=False)
    tokens = np.concatenate([np.array([0, *row.ids, 1], np.uint16) for row in rows])
    return needles.Streams.of({"code": tokens, "prose": tokens})


def test_needles_fit_their_windows_and_know_where_values_stand(model, streams):
    made = list(needles.examples(3001, 40_000, 7, streams, model))
    assert sum(len(m.ids) for m in made) >= 40_000
    assert len({len(m.replies) for m in made}) > 2
    for one in made:
        assert len(one.ids) <= 3001
        marked = np.flatnonzero(one.find >= 0)
        assert (one.ids[marked] == one.ids[one.find[marked]]).all()
        assert (one.find[marked] < one.replies[0][0]).all() and one.loss[marked].all()
        for begin, end in one.replies:
            reply = model.decode(one.ids[begin:end].tolist())
            values = re.findall(r" is ([\w-]+)[.]", reply)
            copied = marked[(marked >= begin) & (marked < end)]
            text = model.decode(one.ids[copied].tolist())
            assert text.replace(" ", "") == "".join(values).replace(" ", "")
    again = list(needles.examples(3001, 40_000, 7, streams, model))
    assert all((a.ids == b.ids).all() for a, b in zip(made, again, strict=True))


def test_chores_are_right():
    r = random.Random(3)
    for _ in range(200):
        ask, _, say = chores.sorting(r)
        given = re.split(", ", ask.split(": ")[1].strip("."))
        found = say.split(", ")
        assert sorted(given) == sorted(found)
        key = int if given[0].isdigit() else str.lower
        assert found == sorted(given, key=key, reverse="from the largest" in ask)
    for _ in range(200):
        ask, _, say = chores.finding(r)
        assert say.rstrip(".").split()[-1] in ask
