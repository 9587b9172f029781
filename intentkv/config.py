"""Configuration of the plugin and per-request options, both validated by pydantic.

Sources, strongest first: arguments (the ``intentkv serve`` flags), ``INTENTKV_*`` environment variables, a TOML or JSON file, defaults.
"""

from __future__ import annotations

import json
import os
import reprlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from intentkv.methods import method_names, method_problem


class ConfigError(ValueError):
    """A configuration or request option that a user can mend; its message is one sentence saying how."""


def _known_method(name: str) -> str:
    if name not in method_names():
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(method_names())}")
    return name


class Config(BaseSettings):
    """Options of one server. Every field has a default; unknown fields are errors.

    Raises:
        ConfigError: from :func:`load_config`, for an unreadable file or an invalid value.
    """

    model_config = SettingsConfigDict(env_prefix="INTENTKV_", extra="forbid", frozen=True)

    method: str = "assistant"
    """Preset from ``intentkv methods``."""
    budget: int = Field(default=8192, ge=1)
    """Tokens a request keeps resident: forced keep plus history."""
    budget_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of the compressible history to keep instead of a fixed budget."""
    hysteresis: int = Field(default=512, ge=0)
    """Tokens over the target before an eviction happens (IntentKV, settings: trigger size 512)."""
    sinks: int = Field(default=0, ge=0)
    """First tokens of the prompt that are always kept."""
    recent: int = Field(default=0, ge=0)
    """Last tokens of the prompt that are always kept."""
    decay: float = Field(default=0.5, ge=0)
    """lambda of the session memories: each turn multiplies the past by e^-lambda."""
    window: int = Field(default=32, ge=1)
    """Observation window of the window-based methods, in tokens (SnapKV)."""
    pool: int = Field(default=7, ge=1)
    """Max-pool width over positions of the window-based methods, odd (SnapKV)."""
    turn_queries: int = Field(default=64, ge=1)
    """Single queries kept of one assistant turn, evenly spaced."""
    decode_interval: int = Field(default=512, ge=0)
    """Generated tokens between two looks at whether a running generation has outgrown its budget; 0: never look."""
    query_rows: int = Field(default=2048, ge=1)
    """Rows of the query bank shared by all running requests."""
    layer_stride: int = Field(default=1, ge=1)
    """Score every n-th layer only."""
    max_sessions: int = Field(default=1024, ge=1)
    """Session states kept, least recently used dropped first."""
    sharing: Literal["any"] = "any"
    """Who may match a pruned prefix; ``any`` is the only mode yet."""
    seed: int = 0
    """Seed of the ``random`` method."""
    head: Path | None = None
    """Folder of a trained head, for the learned methods (``intentkv train fit`` writes one)."""
    record: Path | None = None
    """Folder for logs of all requests (messages, token ids, figures); None: nothing is recorded."""
    record_limit_mb: int = Field(default=1024, ge=1)
    """Size of all logs together, in MB; the oldest shards are deleted beyond it."""
    record_shard_mb: int = Field(default=64, ge=1)
    """Size at which a new log file is begun, in MB."""
    debug: bool = False
    """Assert the invariants after every change (slow)."""

    _check_method = field_validator("method")(_known_method)

    @field_validator("pool")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


class RequestOptions(BaseModel):
    """``custom_params: {"intentkv": {...}}`` of one request; what is not given falls back to the server's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: str | None = None
    budget: int | None = Field(default=None, ge=1)
    budget_ratio: float | None = Field(default=None, gt=0, le=1)
    hysteresis: int | None = Field(default=None, ge=0)
    keep: list[tuple[int, int]] = Field(default_factory=list)
    """Spans ``[start, end)`` of prompt positions that are never evicted."""

    @field_validator("method")
    @classmethod
    def _check_method(cls, value: str | None) -> str | None:
        return value if value is None else _known_method(value)

    def limit(self, config: Config) -> int | float:
        """The request's limit, else the server's: tokens (int), or a share of the history (float)."""
        given = self.budget_ratio if self.budget is None else self.budget
        if given is not None:
            return given
        return config.budget if config.budget_ratio is None else config.budget_ratio

    @field_validator("keep", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return [tuple(pair) if isinstance(pair, list) else pair for pair in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _check(self) -> RequestOptions:
        if self.budget is not None and self.budget_ratio is not None:
            raise ValueError("give budget or budget_ratio, not both")
        for start, end in self.keep:
            if not 0 <= start < end:
                raise ValueError(f"keep span [{start}, {end}) must have 0 <= start < end")
        return self


def _one_sentence(error: ValidationError, what: str, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"no such option; choose from {', '.join(model.model_fields)}"
    # reprlib: what a user sent may be long
    return f"{what}{f' {reprlib.repr(where)}' if where else ''}: {message} (got {reprlib.repr(first['input'])})."


def load_config(path: Path | None = None, **overrides: Any) -> Config:
    """Read the configuration of a server.

    Args:
        path: TOML or JSON file, by suffix.
        overrides: fields given on the command line; ``None`` means not given.

    Raises:
        ConfigError: the file is missing, malformed, or a value is invalid.
    """
    values: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"Config file {str(path)!r} does not exist; give an existing .toml or .json file.")
        source: type[TomlConfigSettingsSource] | type[JsonConfigSettingsSource]
        if path.suffix == ".toml":
            source = TomlConfigSettingsSource
        elif path.suffix == ".json":
            source = JsonConfigSettingsSource
        else:
            raise ConfigError(f"Config file {str(path)!r} must end in .toml or .json.")
        try:
            values = dict(source(Config, path)())
        except OSError as error:
            raise ConfigError(f"Config file {str(path)!r} cannot be read: {error.strerror}.") from error
        except TypeError as error:
            raise ConfigError(f"Config file {str(path)!r} must hold one object of options.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"Config file {str(path)!r} is malformed: {error}.") from error
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        # The environment is stronger than the file: only fields it leaves unset are taken from there.
        env = Config().model_fields_set
        config = Config(**{k: v for k, v in values.items() if k not in env or k in given} | given)
    except ValidationError as error:
        raise ConfigError(_one_sentence(error, "Option", Config)) from error
    problem = method_problem(config.method, config)
    if problem is not None:
        raise ConfigError(problem)
    if config.head is not None:  # requests may name its method, so it must be sound whatever the server's own method is
        from intentkv.head import load_head

        load_head(config.head)
    return config


def parse_request_options(raw: object) -> RequestOptions:
    """Validate one request's ``intentkv`` options (a JSON object, or its text).

    Raises:
        ConfigError: wrong type, unknown field or invalid value.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"custom_params['intentkv'] is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"custom_params['intentkv'] must be a JSON object, got {type(raw).__name__}.")
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_one_sentence(error, "custom_params['intentkv']", RequestOptions)) from error


def config_from_environment() -> Config:
    """The configuration a server process was started with: ``INTENTKV_CONFIG`` as JSON text (complete, from the launcher) or a file's path.

    Raises:
        ConfigError: unreadable or invalid.
    """
    given = os.environ.get("INTENTKV_CONFIG", "")
    if given.lstrip().startswith("{"):
        try:
            options = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"INTENTKV_CONFIG is not valid JSON: {error}.") from error
        return load_config(**options)
    return load_config(Path(given) if given else None)
