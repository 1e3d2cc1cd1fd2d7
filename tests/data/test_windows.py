"""Windows compared with the episodes that they are cut from: contents, masks, coverage, order, shares."""

import tempfile
import threading
from collections import Counter

import pytest
import torch
from doubles_episodes import assert_equal, numbered_episode
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.data.episodes import EpisodeStore
from sparring.data.windows import MixedWindows, SequentialWindows, ShuffledWindows
from sparring.errors import UserError

# keys that identify the steps
IDENTIFYING = ["observation/state", "version"]
MASKS = ("mask", "burn_in", "source")


def make_store(folder, lengths, first=0, **options) -> EpisodeStore:
    store = EpisodeStore(folder, **options)
    for number, steps in enumerate(lengths):
        store.append(numbered_episode(first + number, steps))
    return store


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def steps_of(batch) -> list[list[tuple[int, int]]]:
    """(episode, step) of every step to learn from, row by row."""
    states = batch["observation", "state"].long()
    return [[tuple(s) for s in row[mask].tolist()] for row, mask in zip(states, batch["mask"], strict=True)]


def assert_slices(batch, lengths: list[int], length: int, burn_in: int, clears_memory: bool) -> None:
    """Every row is a slice of the episode in its state, padded with zeros, with the right masks."""
    assert batch.batch_size[1] == burn_in + length
    for row in batch:
        holds = row["mask"] | row["burn_in"] if burn_in else row["mask"]
        columns = holds.nonzero()[:, 0].tolist()
        assert columns == list(range(columns[0], columns[-1] + 1))
        number, first = row["observation", "state"][columns[0]].long().tolist()
        start = int(row["observation", "state"][burn_in][1])
        assert (columns[0], first) == (burn_in - min(start, burn_in), start - min(start, burn_in))
        assert row["mask"].sum() == min(length, lengths[number] - start)
        assert not row["mask"][:burn_in].any()
        expected = numbered_episode(number, lengths[number])[first : first + len(columns)]
        got = row.exclude(*MASKS)
        is_first = torch.zeros(burn_in + length, dtype=torch.bool)
        is_first[columns[0]] = first == 0 or clears_memory
        assert torch.equal(got["is_first"], is_first)
        assert_equal(got[columns].exclude("is_first"), expected.exclude("is_first"))
        # observations have one row more, in the column after the last one
        after = ~holds & (torch.arange(len(holds)) != columns[-1] + 1)
        for key, values in got.exclude("is_first", "next").items(True, True):
            assert not values[after if key[0] == "observation" else ~holds].any()


lengths_of_episodes = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(
    lengths_of_episodes,
    st.integers(1, 8),
    st.integers(0, 5),
    st.sampled_from(["stored", "rebuilt"]),
    st.sampled_from([1, 1 << 20]),
)
def test_shuffled_windows_are_slices_of_episodes(lengths, length, burn_in, memory, segment_bytes):
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(folder, lengths, segment_bytes=segment_bytes)
        windows = ShuffledWindows(store, length, burn_in, memory)
        batch = windows.sample(16, generator())
        assert_slices(batch, lengths, length, burn_in, clears_memory=memory == "rebuilt")
        # as long as the episode permits
        numbers = [row[0][0] for row in steps_of(batch)]
        assert batch["mask"].sum(1).tolist() == [min(length, lengths[n]) for n in numbers]
        assert_equal(windows.sample(16, generator()), batch)


def test_steps_are_drawn_uniformly_except_at_the_ends(tmp_path):
    store = make_store(tmp_path, [20, 3, 40])
    windows = ShuffledWindows(store, length=5, keys=IDENTIFYING)
    counts = Counter(step for row in steps_of(windows.sample(40_000, generator())) for step in row)
    assert len(counts) == 63
    # a window around each of 63 steps: a step in the middle of an episode is in 5 of 63
    middle = 40_000 * 5 / 63
    for step in range(8, 32):
        assert counts[2, step] == pytest.approx(middle, rel=0.1)
    # windows are shifted into the episode: (L+1)/2 begin with the first step, and as many end with the last
    for step in ((0, 0), (0, 19), (2, 0), (2, 39)):
        assert counts[step] == pytest.approx(middle * 3 / 5, rel=0.1)
    assert min(counts.values()) > 0.5 * middle and max(counts.values()) < 1.6 * middle


def test_windows_of_the_newest_episodes_are_drawn_uniformly(tmp_path):
    store = make_store(tmp_path, [9, 4, 2, 6])
    windows = ShuffledWindows(store, 1, keys=IDENTIFYING, newest=2)
    counts = Counter(row[0] for row in steps_of(windows.sample(4000, generator())))
    # episodes 2 and 3, of 2 and 6 steps
    assert set(counts) == {(2, step) for step in range(2)} | {(3, step) for step in range(6)}
    assert all(400 <= times <= 600 for times in counts.values())
    store.append(numbered_episode(4, 3))
    assert {row[0][0] for row in steps_of(windows.sample(200, generator()))} == {3, 4}
    # if there are fewer: all of them
    everything = ShuffledWindows(store, 1, keys=IDENTIFYING, newest=99).sample(400, generator())
    assert {row[0][0] for row in steps_of(everything)} == {0, 1, 2, 3, 4}


def test_windows_start_with_the_stored_memory(tmp_path):
    windows = ShuffledWindows(make_store(tmp_path, [30]), length=4, memory="stored")
    batch = windows.sample(64, generator())
    assert torch.equal(batch["memory", "world_model"][:, 0, 0], batch["observation", "state"][:, 0, 1])
    starts = batch["observation", "state"][:, 0, 1]
    assert torch.equal(batch["is_first"][:, 0], starts == 0)
    assert 0 < batch["is_first"].sum() < 32


def test_only_the_given_keys_are_read_and_images_once(tmp_path):
    store = make_store(tmp_path, [30])
    keys = ["observation/image/head", "next/observation/image/head", "action"]
    batch = ShuffledWindows(store, 4, keys=keys).sample(8, generator())
    assert {k if isinstance(k, str) else "/".join(k) for k in batch.keys(True, True)} == {*keys, "mask", "is_first"}
    now, following = batch["observation", "image", "head"], batch["next", "observation", "image", "head"]
    assert following.data_ptr() == now.data_ptr() + 48
    only_now = ShuffledWindows(store, 4, keys=keys[:1]).sample(8, generator())
    assert torch.equal(only_now["observation", "image", "head"], now)
    assert only_now.get("next", None) is None


@settings(max_examples=50, deadline=None)
@given(lengths_of_episodes, st.integers(1, 8), st.integers(1, 4), st.integers(0, 5))
def test_a_pass_covers_every_step_once_and_each_stream_in_time_order(lengths, length, batch_size, stop_after):
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(folder, lengths)
        windows = SequentialWindows(store, length, batch_size, seed=3)
        batches = list(windows)
        served = Counter(step for batch in batches for row in steps_of(batch) for step in row)
        assert served == Counter((n, t) for n, steps in enumerate(lengths) for t in range(steps))
        for b in range(batch_size):
            stream = [step for batch in batches for step in steps_of(batch[b : b + 1])[0]]
            # episodes one after another, each from its first step to its last
            order = list(dict.fromkeys(n for n, _ in stream))
            assert stream == [(n, t) for n in order for t in range(lengths[n])]
        for batch in batches:
            rows = batch["mask"].any(1)
            assert rows.any()
            assert_slices(batch[rows], lengths, length, 0, clears_memory=False)
        # another one resumes from the state in mid-pass and also gives the same next pass
        stopped, other = (SequentialWindows(store, length, batch_size, seed=3) for _ in range(2))
        first = [batch for batch, _ in zip(stopped, range(stop_after), strict=False)][: len(batches)]
        if stop_after < len(batches):
            other.load_state_dict(stopped.state_dict())
            # `zip` consumed one more batch than it returned
            rest = list(other)
            assert len(rest) == len(batches) - len(first) - 1
            for got, expected in zip(rest, batches[len(first) + 1 :], strict=True):
                assert_equal(got, expected)
            for got, expected in zip(list(other), list(windows), strict=True):
                assert_equal(got, expected)


def test_passes_differ_in_order_and_the_next_one_includes_new_episodes(tmp_path):
    store = make_store(tmp_path, [4] * 30)
    windows = SequentialWindows(store, 4, batch_size=1)
    orders = []
    for _ in range(2):
        batches = iter(windows)
        order = [int(next(batches)["version"][0, 0])]
        if len(store) == 30:
            store.append(numbered_episode(30, 4))
        orders.append(order + [int(batch["version"][0, 0]) for batch in batches])
    assert sorted(orders[0]) == list(range(30)) and sorted(orders[1]) == list(range(31))
    assert orders[0] != [n for n in orders[1] if n < 30]


def test_episodes_deleted_during_a_pass_are_skipped(tmp_path):
    store = make_store(tmp_path, [10] * 20, max_bytes=40_000)
    batches = iter(SequentialWindows(store, 4, batch_size=2))
    seen = [step for row in steps_of(next(batches)) for step in row]
    kept = set(store.numbers.tolist())
    for number in range(20, 27):
        store.append(numbered_episode(number, 10))
    left = kept & set(store.numbers.tolist())
    assert 0 < len(left) < len(kept)
    served = Counter([*seen, *(step for batch in batches for row in steps_of(batch) for step in row)])
    assert max(served.values()) == 1
    assert {n for n, _ in served} >= left and {n for n, _ in served} <= kept
    assert all((n, t) in served for n in left for t in range(10))


def test_mixed_rows_come_from_their_sources_by_weight(tmp_path):
    stores = [make_store(tmp_path / str(i), [12] * 5, first=100 * i) for i in range(3)]
    samplers = [ShuffledWindows(store, 4, 2, keys=IDENTIFYING) for store in stores]
    mixed = MixedWindows({samplers[0]: 6, samplers[1]: 3, samplers[2]: 1})
    batch = mixed.sample(20_000, generator())
    source = batch["source"][:, 0]
    assert torch.equal(batch["observation", "state"][:, 2, 0].long() // 100, source)
    share = torch.bincount(source) / 20_000
    assert share.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    assert_equal(mixed.sample(20_000, generator()), batch)
    # a weight that is too small for one row per batch gets its share over many batches
    g = generator()
    small = MixedWindows({samplers[0]: 0.95, samplers[1]: 0.05})
    rows = sum(int((small.sample(4, g)["source"][:, 0] == 1).sum()) for _ in range(1000))
    assert rows == pytest.approx(200, abs=45)


def test_mixing_stores_with_other_keys_reads_the_common_ones(tmp_path):
    one = make_store(tmp_path / "a", [12])
    other = EpisodeStore(tmp_path / "b")
    other.append(numbered_episode(1, 12, memory=False))
    with pytest.raises(UserError, match="the sources differ in .*a: memory/world_model float32 \\[5\\]; set keys"):
        MixedWindows({ShuffledWindows(one, 4): 1, ShuffledWindows(other, 4): 1}).sample(4, generator())
    keys = ["observation/state", "next/reward", "version"]
    mixed = MixedWindows({ShuffledWindows(store, 4, keys=keys): 1 for store in (one, other)})
    batch = mixed.sample(64, generator())
    code = 1000 * batch["observation", "state"][..., 0] + batch["observation", "state"][..., 1]
    assert torch.equal(batch["next", "reward"][..., 0], code)
    assert batch["version"].unique().tolist() == [0, 1]


def test_every_column_can_be_pinned(tmp_path):
    """Copies into pinned memory are per element, so no two elements may share an address."""
    store = make_store(tmp_path, [8] * 4)
    shuffled = ShuffledWindows(store, 4, 2)
    for windows in (shuffled, MixedWindows({shuffled: 1, ShuffledWindows(store, 4, 2): 1})):
        batch = windows.sample(5, generator())
        assert ("source" in set(batch.keys())) == (windows is not shuffled)
        for key, values in batch.items(True, True):
            assert 0 not in values.stride(), key


def test_sources_of_a_mix_need_the_same_keys(tmp_path):
    store = make_store(tmp_path, [8])
    with pytest.raises(UserError, match="the same keys; got (action and all|all and action)"):
        MixedWindows({ShuffledWindows(store, 4, keys=["action"]): 1, ShuffledWindows(store, 4): 1})


def test_a_store_whose_episodes_were_removed_raises_an_error(tmp_path):
    store = make_store(tmp_path, [8])
    store.rewind(0)
    with pytest.raises(UserError, match="has no episodes; record some"):
        ShuffledWindows(store, 4).sample(2, generator())
    with pytest.raises(UserError, match="has no episodes; record some"):
        next(iter(SequentialWindows(store, 4, 2)))


def test_mistakes_are_explained(tmp_path):
    empty = EpisodeStore(tmp_path / "empty")
    with pytest.raises(UserError, match="has no episodes; record some"):
        ShuffledWindows(empty, 4).sample(2, generator())
    with pytest.raises(UserError, match="has no episodes; record some"):
        next(iter(SequentialWindows(empty, 4, 2)))
    store = make_store(tmp_path / "a", [8])
    with pytest.raises(UserError, match="has no next/action, observation/wrist; found action, "):
        ShuffledWindows(store, 4, keys=["observation/wrist", "next/action"]).sample(2, generator())
    with pytest.raises(UserError, match="memory=stored needs a 'memory/...' key"):
        ShuffledWindows(store, 4, memory="stored", keys=["action"]).sample(2, generator())
    with pytest.raises(UserError, match="at least one > 0"):
        MixedWindows({ShuffledWindows(store, 4): 0})
    with pytest.raises(UserError, match="the same length, burn_in"):
        MixedWindows({ShuffledWindows(store, 4): 1, ShuffledWindows(store, 5): 1})


def test_a_thread_samples_while_another_appends_and_old_episodes_are_deleted(tmp_path):
    lengths = [5 + number * 7 % 20 for number in range(400)]
    store = make_store(tmp_path, lengths[:20], max_bytes=100_000)
    shuffled = ShuffledWindows(store, 6, 2)
    samplers = [shuffled, MixedWindows({shuffled: 1})]
    done, batches = threading.Event(), []

    def sample():
        while not done.is_set():
            batches.extend(sampler.sample(4, generator(len(batches))) for sampler in samplers)

    thread = threading.Thread(target=sample)
    thread.start()
    for number in range(20, 400):
        store.append(numbered_episode(number, lengths[number]))
    done.set()
    thread.join()
    assert store.numbers[0] > 300 and len(batches) > 10
    for batch in batches[:: len(batches) // 10]:
        assert_slices(batch, lengths, 6, 2, clears_memory=True)


def test_a_key_of_zero_entries_is_stored(tmp_path):
    store = EpisodeStore(tmp_path)
    episode = numbered_episode(0, 9)
    store.append(episode.set("extra", torch.zeros(9, 0)))
    assert ShuffledWindows(store, 4).sample(3, generator())["extra"].shape == (3, 4, 0)
    assert store.episode(0)["extra"].shape == (9, 0)


def test_invalid_sizes_are_refused_before_anything_is_read(tmp_path):
    store = make_store(tmp_path, [5])
    for options, message in [
        ({"length": 0}, "length=0: expected a whole number >= 1"),
        ({"length": 2.5}, "length=2.5: expected"),
        ({"length": 2, "burn_in": -1}, "burn_in=-1: expected a whole number >= 0"),
        ({"length": 2, "memory": "kept"}, "memory='kept': expected 'stored' or 'rebuilt'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ShuffledWindows(store, **options)
    windows = ShuffledWindows(store, 2)
    for sampler in (windows, MixedWindows({windows: 1})):
        for batch_size in (0, -1, 1.5):
            with pytest.raises(ValueError, match=f"batch_size={batch_size}: expected a whole number >= 1"):
                sampler.sample(batch_size, generator())
    with pytest.raises(ValueError, match="batch_size=0: expected"):
        SequentialWindows(store, 2, 0)
    with pytest.raises(UserError, match="expected ShuffledWindows .* got EpisodeStore"):
        MixedWindows({store: 1})
