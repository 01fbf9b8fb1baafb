"""What a function sees of the state, and what is left of its changes when it raises."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from semel.client.errors import ConfigError
from semel.patterns.state import RESERVED, KeyedState, State, StateStore, StoreIdentity


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path / "0.sqlite", StoreIdentity("app", "counts", 1, 0, "topic"))
    store.advance({b"old": (7).to_bytes(8, "big"), b"gone": None, RESERVED + b"in": b"{}"}, 3)
    return store


def entered(store: StateStore, form: object = "int64") -> State:
    state = State(KeyedState(format=form).codec(), 1000)  # type: ignore[arg-type]
    state.attach(0, store)
    state.enter(0)
    return state


def test_a_function_reads_its_own_writes_and_the_store_does_not(store: StateStore) -> None:
    state = entered(store)
    state.put("new", 1)
    state.put("old", 8)
    assert (state.get("new"), state.get(b"old"), state.get("gone", 5)) == (1, 8, 5)
    state.delete("old")
    assert state.get("old") is None
    assert list(state.scan()) == [(b"new", 1)]
    assert store.get(b"old") == (7).to_bytes(8, "big")
    assert store.get(b"new") is None


def test_what_a_function_changed_before_it_raised_is_undone(store: StateStore) -> None:
    state = entered(store)
    state.put("kept", 1)
    state.enter(0)
    state.put("kept", 2)
    state.put("kept", 3)
    state.delete("old")
    state.put_many(["kept", "fresh"], [4, 5])
    state.roll_back()
    assert (state.get("kept"), state.get("old"), state.get("fresh")) == (1, 7, None)


def test_columns_and_single_values_are_the_same(store: StateStore) -> None:
    state = entered(store)
    keys = pa.array([b"old", b"new", b"old", b"gone"])
    assert state.get_many(keys).to_pylist() == [7, None, 7, None]
    state.put_many(pa.chunked_array([keys]), pa.array([1, 2, None, -(2**63)]))
    assert [state.get(key) for key in ("old", "new", "gone")] == [None, 2, -(2**63)]
    assert state.get_many(pa.array([], pa.binary())).to_pylist() == []
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        state.put_many(["a", "b"], [1])


def test_formats(store: StateStore) -> None:
    state = entered(store, "json")
    state.put("a", {"n": [1, None]})
    value = state.get("a")
    value["n"].append(2)
    assert state.get("a") == {"n": [1, None]}, "a value that was got and changed is not put"
    assert state.get_many(["a", "b"]) == [{"n": [1, None]}, None]
    state = entered(store, "bytes")
    state.put("a", "text")
    assert state.get_many(["a"]).to_pylist() == [b"text"]
    with pytest.raises(TypeError, match="expected bytes or str"):
        state.put("a", 5)
    state = entered(store, (lambda value: value, lambda data: data))
    with pytest.raises(TypeError, match="serializer returned int"):
        state.put("a", 5)


def test_bad_keys_and_values_are_refused(store: StateStore) -> None:
    state = entered(store, "bytes")
    with pytest.raises(TypeError, match="expected bytes or str"):
        state.get(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reserved"):
        state.put(RESERVED + b"x", b"")
    with pytest.raises(ValueError, match="1001 bytes"):
        state.put("k", bytes(1000))
    with pytest.raises(ValueError, match="1001 bytes"):
        state.put_many(["k"], [bytes(1000)])
    state.leave()
    with pytest.raises(RuntimeError, match="while it is called"):
        state.get("k")
    with pytest.raises(ConfigError, match="one of bytes, json, int64"):
        KeyedState(format="yaml")
    with pytest.raises(ConfigError, match="empty"):
        KeyedState("")
