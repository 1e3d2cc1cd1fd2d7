"""BatchBuilder: batches for any consumer from any store, ready on its device before it asks."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


class BatchBuilder:
    """An iterator over batches, made `prefetch` ahead by a thread of its own.

    From a store with `sample(batch_size, generator)`, batch k is drawn with a generator that is a function of (seed,
    k), for ever. Of anything else that can be iterated the items are the batches; its `state_dict`, if any, is saved as
    of the last batch handed out. A resumed builder goes on with the same batches, as long as the store holds the same;
    a store that is written to is read up to `prefetch` batches early. After an error a store is asked for the same
    batch again; an iterator has ended with its error, which is raised again.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        prefetch: int = 2,
    ):
        if hasattr(source, "sample") == (batch_size is None):
            raise ValueError("batch_size goes with a store to sample() from, and only with such")
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: expected at least 1, the batch that is asked for")
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.device, self.prefetch = torch.device(device), prefetch
        # batches handed out so far
        self.consumed = 0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._remembers = batch_size is None and hasattr(source, "state_dict")
        # after the last batch handed out
        self._source_state: dict | None = source.state_dict() if self._remembers else None
        self._restart()

    def __iter__(self) -> "BatchBuilder":
        return self

    def __next__(self) -> TensorDict:
        self._order()
        wait([self._pending[0]])
        self._raise_failure()
        batch, copied, source_state = self._pending[0].result()
        if batch is None:
            raise StopIteration
        self._pending.popleft()
        self._source_state = source_state
        self.consumed += 1
        self._order()
        if copied is not None:
            # the consumer's stream waits for the copy, and its memory is kept until the stream is done with it
            stream = torch.cuda.current_stream(batch.device)
            stream.wait_event(copied)
            for tensor in batch.values(True, True):
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread; a batch in the making is finished first and dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> "BatchBuilder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def state_dict(self) -> dict:
        return {"seed": self.seed, "consumed": self.consumed, "source": self._source_state}

    def load_state_dict(self, state: dict) -> None:
        # the thread may be at one of them
        wait([future for future in self._pending if not future.cancel()])
        self.seed, self.consumed, self._source_state = state["seed"], state["consumed"], state["source"]
        if self._remembers:
            self.source.load_state_dict(self._source_state)
        self._restart()

    def _restart(self) -> None:
        self._pending: deque[Future] = deque()
        # made by the thread, as the first item may take long
        self._batches: Iterator[TensorDict] | None = None
        self._next = self.consumed

    def _order(self) -> None:
        while len(self._pending) < self.prefetch:
            self._pending.append(self._thread.submit(self._make, self._next))
            self._next += 1

    def _raise_failure(self) -> None:
        """At once, although batches made before are still waiting: they are of a store that is broken."""
        failed = [future for future in self._pending if future.done() and future.exception() is not None]
        if not failed:
            return
        if self.batch_size is not None:
            for future in self._pending:
                future.cancel()
            self._restart()
        raise failed[0].exception()  # type: ignore[misc]

    @torch.inference_mode(False)
    def _make(self, number: int) -> tuple[TensorDict | None, "torch.cuda.Event | None", dict | None]:
        """In the thread: batch `number` on the device (None: no more), the event of its copy, the source's state."""
        batch = self._draw(number) if self.batch_size is not None else self._next_item(number)
        source_state = self.source.state_dict() if self._remembers else None
        if batch is None:
            return None, None, source_state
        if self._stream is None or next(iter(batch.values(True, True))).is_cuda:
            return batch.to(self.device), None, source_state
        with torch.cuda.stream(self._stream):
            batch = batch.pin_memory().to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return batch, copied, source_state

    def _draw(self, number: int) -> TensorDict:
        assert self.batch_size is not None
        # hashed: a generator keeps 32 bits of its seed, in which sums and products of large numbers coincide
        (seed,) = np.random.SeedSequence((self.seed, number)).generate_state(1)
        return self.source.sample(self.batch_size, torch.Generator().manual_seed(int(seed)))

    def _next_item(self, number: int) -> TensorDict | None:
        if self._batches is None:
            self._batches = islice(iter(self.source), 0 if self._remembers else number, None)  # type: ignore[arg-type]
        return next(self._batches, None)
