"""load_file and load_model beside the format's own library; damaged files; modules that stay as they were on errors."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from holding import held
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from same import bits
from torch import nn

import dtorch
from dtorch.client import loading
from dtorch.client.safetensors import DTYPES, File

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file by hand; ``header`` is JSON already when it is bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def info(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def storages() -> list[int]:
    return [dtorch.worker_stats(i)["storages"] for i in range(2)]


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.device.type == "dtorch"
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(bits(got.cpu()), bits(want))


# -- whole files


def _all_dtypes() -> dict[str, torch.Tensor]:
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * 4 * dtype.itemsize,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(3, 4)
    return tensors


def test_every_dtype_is_as_the_formats_library_gives_it(engine: Engine, tmp_path: Path) -> None:
    tensors = _all_dtypes()
    path = save(tmp_path / "all.safetensors", tensors)
    want = safetensors.torch.load_file(path)
    got = dtorch.load_file(path, device="dtorch:1")
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        assert got[name].device == torch.device("dtorch:1")
        assert_equal(got[name], value)


def test_sizes_from_nothing_to_large(engine: Engine, tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (17,), (100, 100), (1 << 20,), (5, 1 << 20), (1,) * 70]
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    path = save(tmp_path / "sizes.safetensors", tensors)
    got = dtorch.load_file(path)
    assert sorted(got) == sorted(safetensors.torch.load_file(path))
    for name, value in tensors.items():
        assert_equal(got[name], value)
    got["t5"].add_(1)
    assert torch.equal(got["t5"].cpu(), tensors["t5"] + 1)
    assert_equal(dtorch.load_file(path)["t5"], tensors["t5"])  # what is loaded is the worker's own


def test_a_file_without_tensors(engine: Engine, tmp_path: Path) -> None:
    assert dtorch.load_file(save(tmp_path / "none.safetensors", {})) == {}


def test_the_client_holds_no_bytes_and_the_worker_counts_them(engine: Engine, tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {"x": torch.ones(1 << 20), "y": torch.ones(1 << 18)})
    before, uploaded = dtorch.memory_allocated(), dtorch.client_stats()["upload_bytes"]
    loaded = dtorch.load_file(path)
    assert dtorch.client_stats()["upload_bytes"] == uploaded
    assert dtorch.memory_allocated() - before == 5 << 20
    lines = {row["line"].partition(" ")[0] for row in dtorch.live_tensors() if row["bytes"] in (4 << 20, 1 << 20)}
    assert any(line.startswith(__file__) for line in lines)
    del loaded
    assert dtorch.memory_allocated() == before


def test_the_file_may_go_or_change_afterwards(engine: Engine, tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {"x": torch.ones(1 << 20)})
    loaded = dtorch.load_file(path)
    path.write_bytes(b"")
    path.unlink()
    assert loaded["x"].cpu().unique().tolist() == [1.0]


def test_placed_by_prefix(engine: Engine, tmp_path: Path) -> None:
    names = ["embed", "layers.1", "layers.1.weight", "layers.10.weight", "layers.1.norm.weight", "head.weight"]
    path = save(tmp_path / "x.safetensors", {name: torch.full((3,), float(i)) for i, name in enumerate(names)})
    loaded = dtorch.load_file(path, device={"": 0, "layers.1": "dtorch:1", "layers.1.norm": torch.device("dtorch:0")})
    assert [loaded[name].device.index for name in names] == [0, 1, 1, 0, 0, 0]
    assert [loaded[name][0].item() for name in names] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match=r"no prefix of 'head.weight' is among \['embed', 'layers'\]"):
        dtorch.load_file(path, device={"layers": 0, "embed": 1})


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("cpu", ValueError, "expected a dtorch device, not cpu"),
        ("dtorch:2", ValueError, "the engine has 2 workers"),
        ({"": 7}, ValueError, "dtorch:7 does not exist"),
    ],
)
def test_a_device_that_is_none(engine: Engine, tmp_path: Path, device: Any, error: type[Exception], text: str) -> None:
    path = save(tmp_path / "x.safetensors", {"x": torch.ones(3)})
    with pytest.raises(error, match=text):
        dtorch.load_file(path, device=device)


def test_the_current_device_is_the_default(engine: Engine, tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {"x": torch.ones(3)})
    with dtorch.device(1):
        assert dtorch.load_file(path)["x"].device.index == 1


# -- damaged and malicious files

GOOD = {"a": info(), "b": info("I32", (1,), (8, 12))}

#: What is wrong with a file -> its header, its bytes, and what the error says.
BAD: dict[str, tuple[Any, bytes, str]] = {
    "gap": ({"a": info(), "b": info("I32", (1,), (12, 16))}, b"x" * 16, "'b' leaves a gap before it"),
    "overlap": ({"a": info(), "b": info("I32", (1,), (4, 8))}, b"x" * 8, "'b' overlaps another tensor"),
    "same bytes": ({"a": info(), "b": info()}, b"x" * 8, "overlaps another tensor"),
    "starts late": ({"a": info(offsets=(4, 12))}, b"x" * 12, "leaves a gap"),
    "cut short": (GOOD, b"x" * 11, "may have been cut short"),
    "cut at the header": (GOOD, b"", "may have been cut short"),
    "too long": (GOOD, b"x" * 13, "1 bytes at its end belong to no tensor"),
    "offsets out of range": ({"a": info(offsets=(1 << 60, (1 << 60) + 8))}, b"x" * 8, "leaves a gap"),
    "offsets backwards": ({"a": info(offsets=(8, 0))}, b"x" * 8, "has -8 bytes"),
    "negative offset": ({"a": info(offsets=(-8, 0))}, b"x" * 8, "has the offsets"),
    "three offsets": ({"a": info(offsets=(0, 8, 8))}, b"x" * 8, "has the offsets"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, b"x" * 8, "has the offsets None"),
    "shape and bytes differ": ({"a": info(shape=(3,))}, b"x" * 8, r"has 8 bytes where F32\[3\] takes 12"),
    "negative size": ({"a": info(shape=(-2,))}, b"x" * 8, "has the shape"),
    "size of text": ({"a": info(shape=("2",))}, b"x" * 8, "has the shape"),
    "size of truth": ({"a": info(shape=(True, 2))}, b"x" * 8, "has the shape"),
    "fraction": ({"a": info(shape=(2.0,))}, b"x" * 8, "has the shape"),
    "sizes that overflow": ({"a": info(shape=(1 << 62, 1 << 62, 0), offsets=(0, 0))}, b"", "no memory can hold"),
    "size beyond 64 bits": ({"a": info(shape=(1 << 64,))}, b"x" * 8, "has the shape"),
    "unknown dtype": ({"a": info("F31")}, b"x" * 8, "dtype 'F31', which dtorch does not know"),
    "dtype of no text": ({"a": info(["F32"])}, b"x" * 8, "has the dtype"),
    "no object": ({"a": 3}, b"", "is not described by an object"),
    "metadata of numbers": ({"__metadata__": {"x": 1}, "a": info()}, b"x" * 8, "__metadata__"),
    "a list": ([GOOD], b"x" * 12, "there is no header"),
    "no JSON": (b"{'a': 1}", b"", "not JSON"),
    "two headers": (b"{}{}", b"", "not JSON"),
    "NaN": (b'{"a": NaN}', b"", "NaN is no JSON"),
    "no text": (b'{"\xff": 3}', b"", "not JSON"),
    "half a character": (b'{"\\ud800": {}}', b"", "is not Unicode"),
    "nested deeply": (b'{"a":' + b"[" * 100_000, b"", "not JSON"),
    "a huge number": (b'{"a":' + b"9" * 100_000 + b"}", b"", "not JSON"),
    "nothing in it": (b"", b"", "there is no header"),
    "a key twice": (b'{"a":{"dtype":"F32","dtype":"F32"}}', b"", "'dtype' occurs twice"),
    "a tensor twice": (
        b'{"a":' + json.dumps(info()).encode() + b',"a":' + json.dumps(info()).encode() + b"}",
        b"x" * 8,
        "'a' occurs twice",
    ),
}

#: Those that the format's library takes: there the second of two tensors with one name counts.
STRICTER = {"a tensor twice"}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_and_nothing_is_left(engine: Engine, tmp_path: Path, what: str) -> None:
    header, data, text = BAD[what]
    path = write(tmp_path / "bad.safetensors", header, data)
    dtorch.empty_cache()  # segments of uploads that lie here go by themselves, perhaps while this test runs
    before, descriptors = storages(), os.listdir("/proc/self/fd")
    with pytest.raises(dtorch.LoadError, match=text) as caught:
        dtorch.load_file(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    if what not in STRICTER:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(path)
    assert storages() == before
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "has 0 bytes"),
        (b"abc", "has 3 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", "100000001 bytes long, more than the format allows"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "more than the format allows"),
        (struct.pack("<Q", 50) + b"{}", "it ends within its header, after 10 bytes of 58"),
        (b"PK\x03\x04" + b"\0" * 60, "there is no header|ends within|more than the format"),  # as torch.save writes
        (b"\x80\x02}q\x00." + b"\0" * 60, "there is no header|ends within|more than the format"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(engine: Engine, tmp_path: Path, raw: bytes, text: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(raw)
    with pytest.raises(dtorch.LoadError, match=text):
        dtorch.load_file(path)


def test_what_is_no_file_is_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dtorch.load_file(tmp_path / "absent")
    with pytest.raises(dtorch.LoadError, match="not a regular file"):
        dtorch.load_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(dtorch.LoadError, match="not a regular file"):
        dtorch.load_file(tmp_path / "pipe")


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3), st.integers(0, 400))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_anywhere_it_is_good_only_if_the_formats_library_says_so(
    tmp_path: Path, changes: list[tuple[int, int]], end: int
) -> None:
    whole = bytearray(safetensors.torch.save({"a": torch.ones(3), "bb": torch.zeros(2, 2, dtype=torch.int16)}))
    for at, value in changes:
        whole[at % len(whole)] = value
    path = tmp_path / "x"
    path.write_bytes(whole if end > len(whole) else whole[:end])
    try:
        with File(str(path)) as file:
            ours = {part.name: (part.dtype, part.shape) for part in file.parts}
    except dtorch.LoadError:
        return
    with safe_open(path, "pt") as theirs:
        assert ours == {name: ((t := theirs.get_tensor(name)).dtype, tuple(t.shape)) for name in theirs.keys()}  # noqa: SIM118


def test_a_file_that_is_cut_short_while_it_is_read(engine: Engine, tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {f"t{i}": torch.ones(1 << 18) for i in range(4)})
    before = storages()
    size = path.stat().st_size

    class Bar:  # stands where the bar does: the header has been read, and no byte behind it
        def __enter__(self) -> Bar:
            os.truncate(path, size - 100)
            return self

        def __exit__(self, *_: object) -> None: ...
        def update(self, n: int) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_bar", lambda *_: Bar())
        with pytest.raises(
            dtorch.LoadError, match=r"tensor 't\d' could not be read: the file ends at byte .* 100 bytes"
        ):
            dtorch.load_file(path)
    assert storages() == before
    dtorch.synchronize()  # nobody else is told of it
    assert dtorch.ones(3).sum().item() == 3


def test_an_interrupted_load_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {f"t{i}": torch.ones(1 << 14) for i in range(100)})
    before = storages()
    with pytest.MonkeyPatch.context() as patch, held(engine):
        from dtorch import _client

        def interrupt(request: int) -> None:
            raise KeyboardInterrupt

        patch.setattr(_client, "done", interrupt)
        with pytest.raises(KeyboardInterrupt):
            dtorch.load_file(path)
    assert storages() == before


def test_without_memory_for_it_it_says_so_and_what_was_there_stays(no_engine: None, tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {f"t{i}": torch.ones(4 << 20) for i in range(4)})
    dtorch.init(workers=1, device="cpu", memory_limit=40 << 20)
    kept = dtorch.ones(1 << 20)
    before = dtorch.memory_allocated()
    with pytest.raises(dtorch.OutOfMemoryError) as caught:
        dtorch.load_file(path)
    assert any("t" in note and str(path) in note for note in caught.value.__notes__)
    assert dtorch.memory_allocated() == before
    assert kept.sum().item() == 1 << 20
    dtorch.synchronize()


def test_a_worker_that_dies_meanwhile(no_engine: None, tmp_path: Path) -> None:
    dtorch.init(workers=2, device="cpu")
    from dtorch.client import engine as engines

    running = engines.current()
    assert running is not None
    assert running.wait_for_workers(60)
    path = save(tmp_path / "x.safetensors", {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)})
    os.kill(running.pids()["worker-1"], signal.SIGKILL)
    with pytest.raises(dtorch.WorkerDied):
        dtorch.load_file(path, device={"a": 0, "b": 1})
    assert dtorch.load_file(path, device=0)["b"].sum().item() == 1 << 20


# -- several files


def _sharded(folder: Path, **of: str) -> Path:
    tensors = {name: torch.full((5,), float(i)) for i, name in enumerate(of)}
    for file in set(of.values()):
        save(folder / file, {name: tensors[name] for name in of if of[name] == file})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": of}))
    return index


def test_an_index_brings_all_its_files(engine: Engine, tmp_path: Path) -> None:
    index = _sharded(tmp_path, a="1.safetensors", b="2.safetensors", c="1.safetensors")
    loaded = dtorch.load_file(index, device={"": 0, "b": 1})
    assert {name: (t[0].item(), t.device.index) for name, t in loaded.items()} == {
        "a": (0, 0),
        "b": (1, 1),
        "c": (2, 0),
    }


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (b"", "not a good index"),
        (b"[]", "not a good index"),
        (b"{}", "it has no 'weight_map'"),
        (b'{"weight_map": 3}', "not a good index"),
        (b'{"weight_map": {"a": 3}}', "not the name of a file beside it"),
        (b'{"weight_map": {"a": "../1.safetensors"}}', "not the name of a file beside it"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "not the name of a file beside it"),
        (b'{"weight_map": {"a": ".."}}', "not the name of a file beside it"),
        (b'{"weight_map": {"a": "1\\u0000"}}', "not the name of a file beside it"),
        (b'{"weight_map": {"z": "1.safetensors"}}', "the index says that it has 'z'"),
    ],
)
def test_a_bad_index_is_refused(engine: Engine, tmp_path: Path, index: bytes, text: str) -> None:
    path = _sharded(tmp_path, a="1.safetensors")
    path.write_bytes(index)
    with pytest.raises(dtorch.LoadError, match=text):
        dtorch.load_file(path)


def test_an_index_without_a_file_of_its_own(engine: Engine, tmp_path: Path) -> None:
    index = _sharded(tmp_path, a="1.safetensors", b="2.safetensors")
    (tmp_path / "2.safetensors").unlink()
    before = storages()
    with pytest.raises(FileNotFoundError, match=r"2\.safetensors"):
        dtorch.load_file(index)
    assert storages() == before


# -- the bar


def test_a_bar_is_shown_when_asked_for_and_on_terminals_only(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "weights.safetensors", {"x": torch.ones(3000)})
    dtorch.load_file(path)
    dtorch.load_file(path, progress=False)
    assert capsys.readouterr() == ("", "")
    dtorch.load_file(path, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "weights.safetensors" in err
    assert "100%" in err
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    dtorch.load_file(path)
    with pytest.raises(ImportError, match="pip install tqdm"):
        dtorch.load_file(path, progress=True)
    monkeypatch.setattr(sys, "stderr", None)
    dtorch.load_file(path)


def test_a_bar_appears_by_itself_where_a_load_takes_long_on_a_terminal(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = save(tmp_path / "weights.safetensors", {"x": torch.ones(3000)})
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    dtorch.load_file(path)  # done long before
    assert screen.getvalue() == ""
    monkeypatch.setattr(loading, "_LONG", 1e-9)
    dtorch.load_file(path)
    assert "weights.safetensors" in screen.getvalue() and "100%" in screen.getvalue()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    dtorch.load_file(path)  # a bar that nobody asked for is not missed


# -- modules


class Tied(nn.Module):
    """Parameters, buffers of two dtypes, a tied weight, and a module with a list of its own (LSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.lstm(self.norm(self.embed(x)))[0])
        return y


def _made(seed: int) -> Tied:
    torch.manual_seed(seed)
    model = Tied()
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(seed)
    return model.eval()


def _identities(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.cpu() for name, t in model.state_dict().items()}


def _check(model: nn.Module, want: nn.Module) -> None:
    for name, value in want.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value), name
    x = torch.arange(5)
    assert torch.equal(model(x.to("dtorch")).cpu(), want(x))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file with the weights of ``_made(1)``, saved as the format's library saves a model with tied weights."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(_made(1), str(path))
    return path


def test_a_module_takes_the_values_and_stays_itself(engine: Engine, weights: Path) -> None:
    model = _made(2).to("dtorch")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = _identities(model)
    told = dtorch.load_model(model, weights)
    assert told == ([], [])
    assert told.missing_keys == []
    assert _identities(model) == before
    assert model.head.weight is model.embed.weight
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    _check(model, _made(1))


def test_each_tensor_is_read_by_the_worker_that_has_it(engine: Engine, weights: Path) -> None:
    model = _made(2).to("dtorch:0")
    model.lstm.to("dtorch:1")
    uploaded, moved = dtorch.client_stats()["upload_bytes"], dtorch.worker_stats(1)["mapped"]
    dtorch.load_model(model, weights)
    assert dtorch.client_stats()["upload_bytes"] == uploaded
    assert dtorch.worker_stats(1)["mapped"] == moved
    assert model.lstm.weight_hh_l0.device.index == 1
    assert torch.equal(model.lstm.weight_hh_l0.cpu(), _made(1).lstm.weight_hh_l0)
    assert torch.equal(model.embed.weight.cpu(), _made(1).embed.weight)


def test_a_module_on_meta_gets_memory_once(engine: Engine, weights: Path) -> None:
    with torch.device("meta"):
        model = Tied().eval()
    model.half()
    model.embed.weight.requires_grad_(False)
    dtorch.reset_peak_memory_stats(1)
    before = dtorch.memory_allocated(1)
    told = dtorch.load_model(model.float(), weights, device="dtorch:1")
    assert told == ([], [])
    assert dtorch.max_memory_allocated(1) - before == os.path.getsize(weights) - 8 - _header_length(weights)
    assert {p.device for p in model.parameters()} == {torch.device("dtorch:1")}
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight.requires_grad
    assert model.lstm.weight_hh_l0.requires_grad
    assert isinstance(model.lstm.weight_hh_l0, nn.Parameter)
    with dtorch.device(1):
        _check(model, _made(1))


def _header_length(path: Path) -> int:
    return int(struct.unpack("<Q", path.read_bytes()[:8])[0])


def test_the_modules_dtype_counts_and_the_files_with_assign(engine: Engine, weights: Path) -> None:
    for make in (lambda: _made(2).to("dtorch"), lambda: _on_meta()):
        model = make().half()
        dtorch.load_model(model, weights)
        assert model.lstm.weight_hh_l0.dtype == torch.float16
        assert torch.equal(model.lstm.weight_hh_l0.cpu(), _made(1).lstm.weight_hh_l0.half())
        assert model.norm.num_batches_tracked.dtype == torch.int64
        model = make().half()
        dtorch.load_model(model, weights, assign=True)
        assert model.head.weight is model.embed.weight
        _check(model, _made(1))


def _on_meta() -> Tied:
    with torch.device("meta"):
        return Tied().eval()


def test_a_module_on_the_cpu_works_too(engine: Engine, weights: Path) -> None:
    model = _made(2)
    dtorch.load_model(model, weights)
    for name, value in _made(1).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_names_that_do_not_fit(engine: Engine, tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to("dtorch")
    before = _values(model)
    path = save(tmp_path / "x.safetensors", {"weight": torch.ones(2, 3), "other": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"bias".*|Unexpected key.*"other"'):
        dtorch.load_model(model, path)
    assert all(torch.equal(value, before[name]) for name, value in _values(model).items())
    told = dtorch.load_model(model, path, strict=False)
    assert told == (["bias"], ["other"])
    assert model.weight.cpu().unique().tolist() == [1.0]
    assert torch.equal(model.bias.cpu(), before["bias"])


def _shape(path: Path) -> None:
    tensors = safetensors.torch.load_file(path)
    tensors["lstm.bias_hh_l0"] = torch.ones(3)  # the one of the last that are put in
    save(path, {name: t.clone() for name, t in tensors.items()})


def _lacking(path: Path) -> None:
    tensors = safetensors.torch.load_file(path)
    del tensors["lstm.bias_hh_l0"]
    save(path, {name: t.clone() for name, t in tensors.items()})


def _cut(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) - 4)


def _foreign(path: Path) -> None:
    torch.save(_made(1).state_dict(), path)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("harm", [_shape, _lacking, _cut, _foreign])
@pytest.mark.parametrize("make", [lambda: _made(2).to("dtorch"), _on_meta], ids=["there", "meta"])
def test_on_any_error_the_module_is_as_it_was(
    engine: Engine, weights: Path, harm: Callable[[Path], None], make: Callable[[], Tied], assign: bool
) -> None:
    model = make()
    meta = model.embed.weight.is_meta
    harm(weights)
    before, values, stored = _identities(model), {} if meta else _values(model), storages()
    lists = [[id(p) for p in model.lstm._flat_weights], [list(m._parameters) for m in model.modules()]]
    with pytest.raises((RuntimeError, dtorch.LoadError)):
        dtorch.load_model(model, weights, assign=assign)
    assert _identities(model) == before
    assert lists == [[id(p) for p in model.lstm._flat_weights], [list(m._parameters) for m in model.modules()]]
    assert storages() == stored
    if not meta:
        assert all(torch.equal(value, values[name]) for name, value in _values(model).items())
        x = torch.arange(5)
        assert torch.equal(model(x.to("dtorch")).cpu(), _made(2)(x))


def test_hooks_of_the_module_are_heard_and_may_fail(engine: Engine, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to("dtorch")
    before = _values(model)
    path = save(tmp_path / "x.safetensors", {f"old.{name}": torch.ones_like(t) for name, t in before.items()})

    def rename(state: dict[str, torch.Tensor], *_: object) -> None:
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)

    handle = model._register_load_state_dict_pre_hook(rename)
    fails = model.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dtorch.load_model(model, path)
    assert all(torch.equal(value, before[name]) for name, value in _values(model).items())
    fails.remove()
    dtorch.load_model(model, path)
    assert all(value.unique().tolist() == [1.0] for value in _values(model).values())
    handle.remove()


def test_the_modules_gradients_and_switches_stay(engine: Engine, weights: Path) -> None:
    model = _made(2).to("dtorch").train()
    model(torch.arange(5, device="dtorch")).sum().backward()
    model.norm.weight.requires_grad_(False)
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dtorch.load_model(model, weights)
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.training
    assert not model.norm.weight.requires_grad
    assert all(p.grad is grads[name] for name, p in model.named_parameters())
    assert torch.equal(model.embed.weight.cpu(), _made(1).embed.weight)
