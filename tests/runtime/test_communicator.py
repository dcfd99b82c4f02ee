"""Communicators between real processes: the same results over shared memory and gloo, and no wait that hangs."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from nereus.limits import REDUCE_SLOT_BYTES, REDUCE_WHOLE_BYTES, reduce_slots_bytes
from nereus.runtime import waiting
from nereus.runtime.communicator import Communicator, CommunicatorAborted, CommunicatorError, _shared_client
from nereus.runtime.engine import run_command
from nereus.runtime.local import LocalEngine, _open_store

GROUP = f"{__package__ or 'tests.runtime'}.services:GroupService"


class Group:
    """Workers 0..size-1 that were connected as one group."""

    epochs = itertools.count(1)

    def __init__(self, engine: LocalEngine, size: int, same_host: bool) -> None:
        self.engine = engine
        self.size = size
        devices, epoch = list(range(size)), next(Group.epochs)
        placed = self.run("connect", *[{"devices": devices, "epoch": epoch, "same_host": same_host}] * size)
        assert placed == [(rank, size) for rank in devices]

    def run(self, method: str, *kwargs: dict[str, Any]) -> list[Any]:
        """Run a command; one argument set is for all ranks, otherwise one a rank."""
        by_rank = kwargs * self.size if len(kwargs) == 1 else kwargs
        results = run_command(self.engine, method, dict(enumerate(by_rank)), label=method, step=None)
        return [results[rank] for rank in range(self.size)]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(GROUP) as engine:
        engine.start([0, 1, 2, 3])
        yield engine


@pytest.fixture(
    params=[(2, True), (3, True), (4, True), (2, False), (3, False)],
    ids=["2-shared", "3-shared", "4-shared", "2-gloo", "3-gloo"],
)
def group(engine: LocalEngine, request: pytest.FixtureRequest) -> Group:
    return Group(engine, *request.param)


SIZES = [1, 7, 2048, REDUCE_WHOLE_BYTES // 8, REDUCE_SLOT_BYTES // 8 + 3, 3 * REDUCE_SLOT_BYTES // 4 + 1]


def test_all_reduce_sums_in_rank_order_bit_for_bit(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in SIZES:
            parts = [torch.randn(count, dtype=torch.float64).mul(10**rank).to(dtype) for rank in range(group.size)]
            expected = parts[0].to(torch.promote_types(dtype, torch.float32))
            for part in parts[1:]:
                expected = expected + part
            results = group.run("all_reduce", *[{"tensor": part, "op": "sum"} for part in parts])
            for result in results:
                assert torch.equal(result, expected.to(dtype)), (dtype, count)


def test_all_reduce_of_integers_and_maxima(group: Group) -> None:
    for dtype in (torch.int64, torch.int32, torch.int8, torch.float32, torch.bfloat16, torch.float16):
        parts = [torch.randint(-20, 20, (3, 50)).to(dtype) for _ in range(group.size)]
        for op, reduce in (("sum", torch.sum), ("max", torch.amax)):
            for result in group.run("all_reduce", *[{"tensor": part, "op": op} for part in parts]):
                assert torch.equal(result, reduce(torch.stack(parts), dim=0).to(dtype)), (dtype, op)


def test_empty_and_scalar_tensors(group: Group) -> None:
    assert group.run("all_reduce", {"tensor": torch.ones(0, 3), "op": "sum"})[0].shape == (0, 3)
    assert group.run("all_reduce", {"tensor": torch.ones(()), "op": "sum"})[1] == group.size
    assert group.run("all_gather", {"tensor": torch.tensor(5.0)})[0] == [5.0] * group.size


@pytest.mark.parametrize("rows", [5, 40_000])
def test_all_gather_of_uneven_parts(group: Group, rows: int) -> None:
    parts = [torch.randn(rows * rank, 2, 3) for rank in range(group.size)]  # rank 0 has none
    for gathered in group.run("all_gather", *[{"tensor": part} for part in parts]):
        assert len(gathered) == group.size
        assert all(torch.equal(result, part) for result, part in zip(gathered, parts, strict=True))


@pytest.mark.parametrize("count", [3, REDUCE_SLOT_BYTES])
def test_broadcast(group: Group, count: int) -> None:
    src = group.size - 1
    parts = [torch.full((count,), float(rank)) for rank in range(group.size)]
    for result in group.run("broadcast", *[{"tensor": part, "src": src} for part in parts]):
        assert torch.equal(result, parts[src])


def test_long_mixed_series_agree_between_shared_memory_and_gloo(engine: LocalEngine) -> None:
    series = []
    for same_host in (True, False):
        results = Group(engine, 3, same_host).run("mixed", {"seed": 5, "rounds": 60})
        series.append(results)
    for one, other in zip(*series, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(other))


def test_messages_match_by_tag_whatever_the_order(group: Group) -> None:
    counts = [5, 0, 200_000, 1, 17]
    results = group.run("exchange", {"counts": counts})
    for rank, received in enumerate(results):
        expected = [(peer, tag) for peer in range(group.size) if peer != rank for tag in range(len(counts))]
        for tensor, (peer, tag) in zip(received, expected, strict=True):
            assert torch.equal(tensor, torch.full((counts[tag],), 100.0 * peer + tag))


def test_many_messages_keep_their_order(group: Group) -> None:
    group.run("ring", {"rounds": 300})


def test_trimming_gives_the_memory_of_read_messages_back(engine: LocalEngine) -> None:
    num_bytes = 8 << 20
    for before, after, is_right in Group(engine, 2, True).run("send_and_trim", *[{"num_bytes": num_bytes}] * 2):
        assert before - after >= 2 * num_bytes  # the buffer of this rank, and the peer's that is mapped here
        assert is_right


@pytest.mark.parametrize("size", [2, 3])
def test_sums_hold_as_much_shared_memory_as_is_predicted_and_give_it_back(engine: LocalEngine, size: int) -> None:
    counts = [60_000, 200_000, 3 * REDUCE_SLOT_BYTES // 4]  # summed whole, in one chunk, in three
    for measured in Group(engine, size, True).run("sum_and_release", *[{"counts": counts}] * size):
        for count, (held, left, is_right) in zip(counts, measured, strict=True):
            predicted = reduce_slots_bytes(size, 4 * count)
            assert is_right
            assert 0.9 * predicted <= held <= 1.1 * predicted + 2**17, (count, held, predicted)  # whole pages
            assert left <= 2**17, (count, left)


def test_one_rank_needs_no_connection() -> None:
    class Flag:
        def is_set(self) -> bool:
            return False

    alone = Communicator.connect(
        store_address=("nowhere", 1), name="x", epoch=0, rank=0, size=1, torch_device=torch.device("cpu"), abort=Flag()
    )
    tensor = torch.ones(2)
    alone.all_reduce(tensor)
    alone.broadcast(tensor, 0)
    alone.barrier()
    assert [part.tolist() for part in alone.all_gather(tensor)] == [[1.0, 1.0]]
    alone.close()


def test_ranks_that_disagree_are_told(engine: LocalEngine) -> None:
    Group(engine, 2, True)
    futures = [engine.submit(rank, "disagree") for rank in (0, 1)]
    errors = [future.exception(timeout=10) for future in futures]
    assert "rank 0 is in sum of 10 torch.float32 while rank 1 is in sum of 11" in str(errors[0])
    assert "rank 1 is in sum of 11 torch.float32 while rank 0 is in sum of 10" in str(errors[1])


def test_an_abort_wakes_every_kind_of_blocked_wait() -> None:
    with LocalEngine(GROUP) as engine:
        engine.start(range(9))
        blocked = []
        for epoch, (same_host, way) in enumerate(itertools.product([True, False], ["recv", "all_reduce"])):
            devices = [2 * epoch, 2 * epoch + 1]
            connection = {"devices": devices, "epoch": epoch, "same_host": same_host}
            run_command(engine, "connect", dict.fromkeys(devices, connection), label="connect", step=None)
            blocked.append(engine.submit(devices[0], "block", way=way))
        blocked.append(engine.submit(8, "connect", devices=[8, 9], epoch=9, same_host=True))  # 9 never comes
        done, _ = wait(blocked, timeout=0.5)
        assert not done
        engine.abort()
        assert [future.exception(timeout=5).error_type for future in blocked] == [CommunicatorAborted.__name__] * 5


@pytest.mark.parametrize("same_host", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("recv", r"rank 0 waits for .*rank 1 \(recv with tag 7\), in vain for 0\.3 s"),
        ("all_reduce", r"rank 0 waits for rank 1 .*, in vain for 0\.3 s"),
        ("barrier", r"rank 0 waits for rank 1 .*, in vain for 0\.3 s"),
    ],
)
def test_a_wait_ends_and_says_what_for(same_host: bool, way: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect(rank: int) -> Communicator:
        return Communicator.connect(
            store_address=("127.0.0.1", store.port), name=f"{way}-{same_host}", epoch=0, rank=rank, size=2,
            torch_device=torch.device("cpu"), abort=threading.Event(), same_host=same_host,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads:
        mine, peer = threads.map(connect, range(2))
    monkeypatch.setattr(waiting, "WAIT_LIMIT_S", 0.3)
    waits = {
        "recv": lambda: mine.recv(torch.ones(3), 1, tag=7).wait(),
        "all_reduce": lambda: mine.all_reduce(torch.ones(3)),
        "barrier": mine.barrier,
    }
    with pytest.raises(CommunicatorError, match=said):
        waits[way]()
    mine.close()
    peer.close()


def test_a_member_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(waiting, "WAIT_LIMIT_S", 0.1)
    with pytest.raises(CommunicatorError, match="rank 0 of 3 waits for rank 1, 2 to join the group"):
        Communicator.connect(
            store_address=("127.0.0.1", store.port), name="alone", epoch=0, rank=0, size=3,
            torch_device=torch.device("cpu"), abort=threading.Event(),
        )  # fmt: skip


def test_a_process_has_one_client_of_a_store_and_a_new_one_of_another_with_its_port() -> None:
    """Each new client asks the name service, which may be out of reach."""
    first = _open_store()
    address = (first.host, first.port)
    client = _shared_client(address)
    assert _shared_client(address) is client
    del first
    second = TCPStore(*address, is_master=True, wait_for_workers=False)
    second.set("key", "of the second")
    other = _shared_client(address)
    assert other is not client and other.get("key") == b"of the second"
