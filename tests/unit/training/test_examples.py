"""Examples on disk: split by group, resumable to the byte, counted, and the same tensors that were put in."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch

from intentkv.config import ConfigError
from intentkv.trajectories import load_dataset
from intentkv_training import examples as room
from intentkv_training.examples import Example, ExampleStore, build_examples, example_settings, make_example, session_turns, split_of
from intentkv_training.session import pieces, tokenise

from .conftest import OPTIONS, write_agents

pytestmark = pytest.mark.unit


def table(folder):
    store = ExampleStore(folder)
    return [dict(row) for split in ("train", "validation", "test") for row in store.load(split)]


def test_split_by_group(example_folder, agents):
    """Catches: a split by line, a group in two splits, a split that depends on the order of the logs."""
    rows = table(example_folder)
    groups = {row["group"]: set() for row in rows}
    for row in rows:
        groups[row["group"]].add(row["split"])
    assert len(groups) == 4
    assert all(len(splits) == 1 for splits in groups.values())
    runs = Counter(row["group"] for row in rows)
    assert all(count == 6 for count in runs.values()), "three runs a group, two turns a run"
    settings = ExampleStore(example_folder).settings()
    names = [f"group{i}" for i in range(2000)]
    share = Counter(split_of(name, settings) for name in names)
    assert share["test"] == pytest.approx(500, abs=80)
    assert share["validation"] == pytest.approx(500, abs=80)
    assert len(list(example_folder.glob("shard-?????"))) > 1


def test_tensors_come_back(frozen, agents, example_folder):
    """Catches: rows mixed up, a label under another's name, the rule column of the wrong rule."""
    trajectory = load_dataset([agents]).trajectories[0]
    settings = ExampleStore(example_folder).settings()
    tokens = tokenise(trajectory, frozen).until(settings.max_tokens)
    reading = frozen.read(tokens.ids)
    (row,) = [row for row in table(example_folder) if row["id"] == trajectory.id and row["turn"] == 4]
    turn = next(t for t in session_turns(tokens, reading, frozen, settings) if t.number == 4)
    made = make_example(turn, tokens, reading, trajectory, frozen, settings)
    read = Example.from_bytes(row["tensors"], settings.floor)
    for name, label in made.labels.items():
        assert torch.equal(read.labels[name], label)
    for rule, inputs in made.inputs.items():
        assert torch.equal(read.inputs[rule].rule, inputs.rule)
        torch.testing.assert_close(read.inputs[rule].extra, inputs.extra, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(read.inputs[rule].keys, inputs.keys, rtol=2e-3, atol=2e-3)
    assert torch.equal(read.template, made.template)
    assert not made.labels["published"][made.template].any() or made.template.any()


def test_published_label_finds_the_ticket(frozen, agents, example_folder):
    """The agent's next call names what the last result said. Catches: a look-ahead that starts a turn late or reads the past."""
    trajectory = load_dataset([agents]).trajectories[0]
    settings = ExampleStore(example_folder).settings()
    tokens = tokenise(trajectory, frozen).until(settings.max_tokens)
    reading = frozen.read(tokens.ids)
    found = {}
    for turn in session_turns(tokens, reading, frozen, settings):
        if turn.prompt.length > 150:
            example = make_example(turn, tokens, reading, trajectory, frozen, settings)
            history = room.candidates(turn.prompt)
            marked = [tokens.ids[p] for p in history[example.labels["published"] > 0].tolist()]
            found[turn.number] = frozen.tokenizer.decode(marked)
    assert found[3].replace(" ", "") == "ticket0x2"
    assert found[4] == "", "no call is left"


def test_examples_of_a_conversation_in_pieces(frozen, tmp_path):
    """Ten calls in pieces of a few. Catches: turns numbered by their place in the piece, labels from the calls of the first pieces."""
    agents = write_agents(tmp_path / "long.jsonl", 3, turns=10)
    options = OPTIONS | {"max_tokens": 600, "per_piece": 8, "validation": 0.0, "test": 0.0}
    settings = example_settings(frozen, [agents], **options)
    counts = build_examples([agents], tmp_path / "out", frozen, settings)
    trajectory = load_dataset([agents]).trajectories[0]
    whole = tokenise(trajectory, frozen)
    rows = {row["turn"]: row for row in ExampleStore(tmp_path / "out").load("train") if row["id"] == trajectory.id}
    parts = list(pieces(whole, 600, settings.pieces))
    assert len(parts) > 2
    assert counts["pieces"] >= 3 * len(parts) - 3
    told = 0
    for part in parts:
        said = [span for span in part.messages if span.role == "assistant"]
        for number, answer in enumerate(said):
            turn = part.skipped + number
            prompt = frozen.parser.parse(part.ids[: answer.start + len(part.generation_prompt)], 0)
            history = room.candidates(prompt)
            if turn not in rows:
                assert len(history) < OPTIONS["min_history"]
                continue
            row = rows.pop(turn)
            assert row["n"] == len(history)
            label = Example.from_bytes(row["tensors"], settings.floor).labels["published"]
            marked = frozen.tokenizer.decode([part.ids[p] for p in history[label > 0].tolist()]).replace(" ", "")
            # the call of turn t names what the result of turn t - 2 said; what is called is in the log, whole
            said_before = number >= 2 and 1 < turn < 10
            assert set(re.findall(r"ticket0x(\d+)", marked)) == ({str(turn - 1)} if said_before else set()), f"turn {turn}"
            told += said_before
    assert not rows, "a turn twice or of no piece"
    assert told > 3


def interrupted(files, out, frozen, settings, after, monkeypatch):
    """Stop while trajectory ``after`` is being read, as a kill would."""
    real, seen = room._rows, []

    def rows(trajectory, *rest):
        seen.append(trajectory.id)
        if len(seen) > after:
            raise KeyboardInterrupt
        return real(trajectory, *rest)

    monkeypatch.setattr(room, "_rows", rows)
    with pytest.raises(KeyboardInterrupt):
        build_examples(files, out, frozen, settings, shard_bytes=60_000)
    monkeypatch.setattr(room, "_rows", real)


def test_an_interrupted_build_goes_on(frozen, agents, example_folder, tmp_path, monkeypatch):
    """Catches: rows lost or made twice, counts that start anew."""
    settings = ExampleStore(example_folder).settings()
    out = tmp_path / "examples"
    interrupted([agents], out, frozen, settings, 7, monkeypatch)
    counts = build_examples([agents], out, frozen, settings, shard_bytes=60_000)
    assert table(out) == table(example_folder)
    whole = json.loads((example_folder / room.STATE_FILE).read_text())
    assert counts == whole["counts"]
    assert counts["trajectories"] == 12
    assert build_examples([agents], out, frozen, settings) == counts, "a finished folder is left alone"


def test_a_limited_build_goes_on(frozen, agents, example_folder, tmp_path):
    """Catches: a trial run of a few conversations that ends the folder, and a smaller limit that makes rows twice."""
    settings, out = ExampleStore(example_folder).settings(), tmp_path / "examples"
    for limit, expected in ((3, 3), (7, 7), (2, 7), (None, 12)):
        assert build_examples([agents], out, frozen, settings, 60_000, limit)["trajectories"] == expected
    assert sorted(row["id"] for row in table(out)) == sorted(row["id"] for row in table(example_folder))


def test_other_settings_are_refused(frozen, agents, example_folder):
    other = example_settings(frozen, [agents], **(OPTIONS | {"horizon_turns": 3}))
    with pytest.raises(ConfigError, match="other settings"):
        build_examples([agents], example_folder, frozen, other)


def test_an_earlier_version_is_refused(frozen, agents, example_folder, tmp_path):
    """Its settings have other names. Catches: examples with other features, continued or trained on under this version's defaults."""
    settings = json.loads((example_folder / room.SETTINGS_FILE).read_text())
    del settings["pieces"]
    settings["per_trajectory"] = settings.pop("per_piece")
    (tmp_path / room.SETTINGS_FILE).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="of this version"):
        build_examples([agents], tmp_path, frozen, ExampleStore(example_folder).settings())


def test_what_is_left_out_is_counted(frozen, agents, tmp_path):
    """Catches: a broken line or a short run that ends the build or vanishes."""
    file = tmp_path / "mixed.jsonl"
    short = {"id": "short", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    mute = {"id": "mute", "messages": [{"role": "user", "content": "hi"}]}
    lines = [json.dumps(short), "{broken", json.dumps(mute), agents.read_text().splitlines()[0]]
    file.write_text("\n".join(lines) + "\n")
    counts = build_examples([file], tmp_path / "out", frozen, example_settings(frozen, [file], **OPTIONS))
    assert counts["broken lines"] == 1
    assert counts["trajectories"] == 3
    assert counts["pieces too short"] == 1
    assert counts["trajectories without an assistant turn"] == 1
    assert counts["examples"] == 2


def test_no_examples(tmp_path):
    with pytest.raises(ConfigError, match="intentkv train examples"):
        ExampleStore(tmp_path).settings()
    with pytest.raises(ConfigError, match="intentkv train examples"):
        ExampleStore(tmp_path).load("train")
