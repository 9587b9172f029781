"""The servers, started when first asked for and shared by all tests, and what every one of them must still be after each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from intentkv.head import HeadConfig, ResidualHead, save_head
from intentkv_eval.server import running_server
from intentkv_training.model import FrozenModel

from .harness import API_KEY, BUDGET, CHUNK, DECODE_INTERVAL, POOL, TIGHT_POOL, Chat, Client
from .oracle import DenseModel

# The scheduler of an idle server polls, at a whole core, unless told to sleep.
_COMMON = ["--sleep-on-idle", "--method", "assistant", "--budget", str(BUDGET)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def alarms() -> Iterator[None]:
    """Every server runs on the CPU, with SGLang's strict checks and our own: an accounting error ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
        patch.setenv("INTENTKV_DEBUG", "1")
        patch.setenv("INTENTKV_DECODE_INTERVAL", str(DECODE_INTERVAL))
        yield


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def _served(alarms: None, tiny_model: Path, logs: Path) -> Iterator[Client]:
    arguments = ["--model", str(tiny_model), *_COMMON, "--max-total-tokens", str(POOL)]
    with running_server(arguments, logs / "served.log") as server:
        yield Client(server)


@pytest.fixture(scope="session")
def _tight(alarms: None, tiny_model: Path, logs: Path) -> Iterator[Client]:
    # A schedule this bold admits more than fits, so that SGLang has to retract.
    arguments = ["--model", str(tiny_model), *_COMMON, "--max-total-tokens", str(TIGHT_POOL), "--schedule-conservativeness", "0.01"]
    arguments += ["--chunked-prefill-size", str(CHUNK), "--api-key", API_KEY]
    with running_server(arguments, logs / "tight.log") as server:
        yield Client(server, API_KEY)


@pytest.fixture(scope="session")
def _stock(alarms: None, tiny_model: Path, logs: Path) -> Iterator[Client]:
    arguments = ["--model", str(tiny_model), "--stock", "--sleep-on-idle", "--max-total-tokens", str(POOL)]
    with running_server(arguments, logs / "stock.log") as server:
        yield Client(server)


@pytest.fixture(scope="session")
def _plain(alarms: None, tiny_model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "without_markers")
    for file in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        file.write_text(file.read_text().replace("<|im_start|>", "<|left|>").replace("<|im_end|>", "<|right|>"))
    arguments = ["--model", str(folder), *_COMMON, "--max-total-tokens", str(POOL), "--disable-overlap-schedule"]
    with running_server(arguments, logs / "plain.log") as server:
        yield Client(server)


@pytest.fixture
def served(_served: Client) -> Iterator[Client]:
    """The plugin with an ample pool and overlap scheduling, method ``assistant``."""
    _served.flush()
    yield _served
    _served.check_idle()


@pytest.fixture
def tight(_tight: Client) -> Iterator[Client]:
    """The plugin with a pool of 1500 tokens, chunks of 128 and an API key."""
    _tight.flush()
    yield _tight
    _tight.check_idle()


@pytest.fixture
def plain(_plain: Client) -> Iterator[Client]:
    """The plugin without overlap scheduling, and with a tokenizer that has the markers of no known chat template."""
    _plain.flush()
    yield _plain
    _plain.check_idle()


@pytest.fixture
def stock(_stock: Client) -> Iterator[Client]:
    """The same server without the plugin."""
    _stock.flush()
    yield _stock
    assert _stock.http.get("/health").status_code == 200


@pytest.fixture(scope="session")
def frozen(tiny_model: Path) -> FrozenModel:
    return FrozenModel(tiny_model)


@pytest.fixture(scope="session")
def head(tiny_model: Path, frozen: FrozenModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head: it disagrees with its rule about most positions."""
    torch.manual_seed(3)
    made = ResidualHead(HeadConfig(rule="assistant", shape=frozen.shape))
    torch.nn.init.normal_(made.output.weight, std=0.5)
    folder = tmp_path_factory.mktemp("head") / "head"
    save_head(made, folder)
    return folder


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "logs"


@pytest.fixture(scope="session")
def learned(alarms: None, tiny_model: Path, head: Path, records: Path, logs: Path) -> Iterator[Client]:
    """A server with a head, which records."""
    arguments = ["--model", str(tiny_model), "--sleep-on-idle", "--method", "assistant-learned", "--head", str(head)]
    arguments += ["--record", str(records), "--max-total-tokens", str(POOL), "--api-key", "topsecret"]
    with running_server(arguments, logs / "learned.log") as server:
        yield Client(server, "topsecret")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    return tokenizer


@pytest.fixture
def new_chat(tokenizer: PreTrainedTokenizerBase, request: pytest.FixtureRequest) -> Callable[[], Chat]:
    """Makes conversations that differ from those of any other test: nothing but the first marker is shared by accident."""
    made = iter(range(1000))
    return lambda: Chat(tokenizer, seed=f"{request.node.nodeid}/{next(made)}")


@pytest.fixture(scope="session")
def dense(tiny_model: Path) -> DenseModel:
    return DenseModel(tiny_model)
