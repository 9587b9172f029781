"""Where options come from, and what a user reads when one is wrong."""

from __future__ import annotations

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv.config import Config, ConfigError, config_from_environment, load_config, parse_request_options

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("INTENTKV_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def message_of(error):
    """The error's text, after checking that it is one line and one sentence for a user."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert not text.endswith("..")
    assert not re.search(r"pydantic|https?://|Traceback", text)
    assert len(text) < 400
    return text


def raised(*args, **kwargs):
    with pytest.raises(ConfigError) as error:
        load_config(*args, **kwargs)
    return message_of(error)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_precedence(write, monkeypatch, suffix):
    """Arguments over environment over file over defaults. Catches: a source swapped, or one that hides the others' fields."""
    values = {"budget": 1, "sinks": 1, "recent": 1}
    text = json.dumps(values) if suffix == "json" else "\n".join(f"{k} = {v}" for k, v in values.items())
    monkeypatch.setenv("INTENTKV_BUDGET", "2")
    monkeypatch.setenv("INTENTKV_SINKS", "2")
    config = load_config(write(f"c.{suffix}", text), budget=3, window=None)
    assert (config.budget, config.sinks, config.recent) == (3, 2, 1)
    assert config.window == Config.model_fields["window"].default


def test_an_argument_equal_to_the_default_still_wins(monkeypatch):
    """Catches: "not given" guessed from the value."""
    default = Config.model_fields["budget"].default
    monkeypatch.setenv("INTENTKV_BUDGET", "2")
    assert load_config(budget=default).budget == default
    assert load_config(sinks=0).budget == 2


def test_environment_values_are_converted(monkeypatch):
    for name, text in {"BUDGET_RATIO": "0.25", "DEBUG": "true", "METHOD": "snapkv", "SEED": "-3"}.items():
        monkeypatch.setenv(f"INTENTKV_{name}", text)
    config = load_config()
    assert (config.budget_ratio, config.debug, config.method, config.seed) == (0.25, True, "snapkv", -3)


def test_other_variables_with_our_prefix_are_left_alone(monkeypatch):
    """The launcher and the version check read variables of their own."""
    monkeypatch.setenv("INTENTKV_ALLOW_UNTESTED_SGLANG", "1")
    assert load_config() == Config()


bad_values = [
    ("budget", 0),
    ("budget", "many"),
    ("budget", 1.5),
    ("budget_ratio", 0),
    ("budget_ratio", 1.5),
    ("budget_ratio", "nan"),
    ("hysteresis", -1),
    ("pool", 4),
    ("decay", -0.1),
    ("window", 0),
    ("turn_queries", 0),
    ("max_sessions", 0),
    ("sharing", "everyone"),
    ("debug", "perhaps"),
    ("method", "magic"),
]


@pytest.mark.parametrize(("name", "value"), bad_values)
@pytest.mark.parametrize("source", ["argument", "file", "environment"])
def test_bad_value(write, monkeypatch, source, name, value):
    """Catches: a wrong value from any source that is accepted, raises something else, or does not name the option."""
    if source == "argument":
        text = raised(**{name: value})
    elif source == "file":
        text = raised(write("c.json", json.dumps({name: value})))
    else:
        monkeypatch.setenv(f"INTENTKV_{name.upper()}", str(value))
        text = raised()
    assert repr(name) in text
    assert str(value) in text


def test_unknown_method_lists_the_known_ones():
    assert "snapkv" in raised(method="magic")


def test_unknown_option_lists_the_known_ones(write):
    text = raised(write("c.toml", "budgt = 5"))
    assert "'budgt'" in text
    assert "budget" in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.toml", "budget = = 1", "malformed"),
        ("c.json", "{budget: 1}", "malformed"),
        ("c.toml", b"\xff\xfe\x00", "malformed"),
        ("c.json", b"\xff\xfe\x00", "malformed"),
        ("c.json", '{"budget": ' + "[" * 100_000, "malformed"),
        ("c.json", "[1, 2]", "one object"),
        ("c.json", "null", "one object"),
        ("c.yaml", "budget: 1", ".toml or .json"),
        ("c", "budget = 1", ".toml or .json"),
    ],
)
def test_bad_file(write, name, content, says):
    """Catches: a parser's exception that reaches the user, a file ignored in silence."""
    path = write(name, content)
    text = raised(path)
    assert says in text
    assert str(path) in text


def test_missing_file(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        assert "does not exist" in raised(path)


def test_unreadable_file(write, monkeypatch):
    """A stand-in for missing permissions, which root, as whom tests may run, never meets."""
    path = write("c.toml", "budget = 1")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert "Permission denied" in raised(path)


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().budget = 1


def test_config_from_environment(write, monkeypatch):
    """What the launcher hands to the server process. Catches: options lost between the two."""
    assert config_from_environment() == Config()
    sent = load_config(budget=7, method="random", budget_ratio=0.5)
    monkeypatch.setenv("INTENTKV_CONFIG", sent.model_dump_json())
    assert config_from_environment() == sent
    monkeypatch.setenv("INTENTKV_CONFIG", str(write("c.toml", "budget = 9")))
    assert config_from_environment().budget == 9


@pytest.mark.parametrize(("given", "says"), [("{", "valid JSON"), ('{"budget": 0}', "'budget'"), ("nowhere.toml", "does not exist")])
def test_bad_config_from_environment(monkeypatch, given, says):
    monkeypatch.setenv("INTENTKV_CONFIG", given)
    with pytest.raises(ConfigError) as error:
        config_from_environment()
    assert says in message_of(error)


def test_request_options():
    given = {"method": "snapkv", "budget_ratio": 0.5, "hysteresis": 0, "keep": [[0, 4], [7, 9]]}
    for raw in (given, json.dumps(given)):
        options = parse_request_options(raw)
        assert (options.method, options.budget, options.budget_ratio, options.hysteresis) == ("snapkv", None, 0.5, 0)
        assert options.keep == [(0, 4), (7, 9)]
    assert parse_request_options({}).keep == []


@pytest.mark.parametrize(
    "raw",
    [
        None,
        3,
        [],
        "",
        "{",
        "[]",
        "[" * 100_000,
        {"budget": 0},
        {"budget": True},
        {"budget": "8"},
        {"budget": 1.0},
        {"budget": 1, "budget_ratio": 0.5},
        {"budget_ratio": 0},
        {"budget_ratio": float("nan")},
        {"hysteresis": -1},
        {"method": "magic"},
        {"method": 3},
        {"keep": "0-4"},
        {"keep": None},
        {"keep": [[0]]},
        {"keep": [[0, 1, 2]]},
        {"keep": [[4, 4]]},
        {"keep": [[-1, 4]]},
        {"keep": [["0", 4]]},
        {"keep": [4]},
        {"max_sessions": 1},
        {"x" * 5000: "y" * 5000},
        {3: 4},
    ],
    ids=lambda raw: str(raw)[:30],
)
def test_bad_request_options(raw):
    """Each becomes a 400 for its request.

    Catches: a coerced or ignored value, an exception of another kind, a reply as long as the input.
    """
    with pytest.raises(ConfigError) as error:
        parse_request_options(raw)
    assert "custom_params['intentkv']" in message_of(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
)
names = st.sampled_from(["method", "budget", "budget_ratio", "hysteresis", "keep"])


@given(raw=json_values | st.dictionaries(names, json_values, max_size=3))
def test_any_json_is_accepted_or_a_config_error(raw):
    """Catches: anything a client can send that raises something else in the server."""
    try:
        options = parse_request_options(raw)
    except ConfigError:
        return
    assert options.budget is None or options.budget >= 1
    assert all(0 <= start < end for start, end in options.keep)
