"""Cost of secure sums: a masked round against the ideal sum, and sums in Ray's actors.

    python scripts/bench_sums.py                       # masks: 10 and 100 clients, 1e5 numbers each
    python scripts/bench_sums.py --clients 10 100 1000
    FEDGEN_DATA=... python scripts/bench_sums.py --ray 3400

All clients of a round and the server are in this process, on one core. The reference is a
simulation: each client's share of the noise, and the sum of their words. ``--ray`` runs one round
of DP-MERF with responses of 1e5 numbers (10,000 features, 10 labels) on as many clients, in this
machine's actors, and once more with each response sent separately.

Print a line of JSON for each case: milliseconds, bytes per client, and the ratio to the reference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from fedgen.config.compose import compose
from fedgen.federation import messages
from fedgen.federation.runtimes.ray_grid import RayGrid
from fedgen.federation.secagg.masking import Masker, MaskingError, unmask
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.events import Relation
from fedgen.privacy.mechanisms import ClientGaussian
from fedgen.randomness import RandomStreams
from fedgen.run import train

CONTEXT = b"bench/0"


def masked_round(
    sums: Secure, words: dict[int, np.ndarray], gone: tuple[set[int], set[int], set[int]]
) -> tuple[np.ndarray | None, list[int], int]:
    """Run a round. ``gone``: clients that drop out after keys, shares and words. Return the sum
    (None if refused), the responders, and the bytes that a client sends and receives besides the
    words."""
    maskers = {client: Masker(client, sums, CONTEXT) for client in words}
    keys = {client: each.announce() for client, each in maskers.items()}
    dealt = {c: each.seal_shares(keys) for c, each in maskers.items() if c not in gone[0]}
    moved = sum(map(len, keys.values())) * (1 + len(keys))
    moved += 2 * sum(len(text) for each in dealt.values() for text in each.values())
    answered, total = set(), np.zeros(len(words[0]), np.uint32)
    silent: set[int] = set()
    try:
        for client in dealt:
            if client not in gone[1]:
                inbox = {o: each[client] for o, each in dealt.items() if client in each}
                maskers[client].open(inbox)
                total += maskers[client].mask(words[client])
                answered.add(client)
        silent = set(dealt) - answered
        revealed = {c: maskers[c].reveal(answered, silent) for c in answered - gone[2]}
        moved += sum(len(share) for each in revealed.values() for share in each.values())
        result, _ = unmask(total, keys, answered, silent, revealed, sums, CONTEXT)
    except MaskingError:
        return None, sorted(answered), moved // len(words)
    return result, sorted(answered), moved // len(words)


def masks(clients: int, numbers: int, rates: Iterable[float], repeats: int) -> None:
    sums = Secure(clients, -(-2 * clients // 3), 0)
    mechanism = ClientGaussian(1.0, 1.0, Relation.ADD_OR_REMOVE_ONE, aggregation=sums)
    streams, vector = RandomStreams.from_seed(0, "seeded"), torch.zeros(numbers)
    begin = time.perf_counter()
    words = {}
    for client in range(clients):
        share = mechanism.release(numbers, lambda: vector, streams.at(client)).arrays["answer"]
        words[client] = share.reshape(-1).view(np.uint32)
    ideal_sum = np.sum(list(words.values()), axis=0, dtype=np.uint32)
    ideal = time.perf_counter() - begin
    assert len(ideal_sum) == numbers
    for rate in rates:
        rng, times, exact, void, sent = np.random.default_rng(0), [], 0, 0, 0
        for _ in range(repeats):
            stages = [set(np.flatnonzero(rng.random(clients) < rate).tolist()) for _ in range(3)]
            begin = time.perf_counter()
            result, answered, sent = masked_round(sums, words, (stages[0], stages[1], stages[2]))
            times.append(time.perf_counter() - begin)
            if result is None:
                void += 1
                continue
            right = np.sum([words[client] for client in answered], axis=0, dtype=np.uint32)
            exact += int(np.array_equal(result, right))
        assert exact + void == repeats, "a sum that is neither exact nor void"
        found_ms = 1000 * float(np.median(times))
        line = {
            "clients": clients,
            "numbers": numbers,
            "dropouts_at_each_stage": rate,
            "exact": exact,
            "void": void,
            "masked_round_ms": round(found_ms, 1),
            "ideal_round_ms": round(1000 * ideal, 1),
            "masked_and_ideal_over_ideal": round(1 + found_ms / 1000 / ideal, 2),
            "bytes_a_client_words": 4 * numbers,
            "bytes_a_client_masks": sent,
        }
        print(json.dumps(line), flush=True)


def on_ray(clients: int) -> None:
    words = ["method=dp_merf", "data=mnist", "partition=iid", f"partition.clients={clients}"]
    words += ["method.features=10000", "method.fakes_per_label=1", "rounds=1", "evaluation=none"]
    words += ["privacy.aggregation=secure", "runtime=ray", "runtime.num_cpus=1"]
    words += ["runtime.threads=1", "method.rows=60000"]
    result: dict[str, dict[str, Any]] = {}
    whole, arrived, count = RayGrid.start, Counter[str](), messages.count_bytes

    def counting(message: Message) -> int:  # a run counts what each client would have sent
        arrived[name] += count(message) if message.metadata.reply_to_message_id else 0
        return count(message)

    messages.count_bytes = counting
    for name in ("added up in the actors", "each by itself"):
        if name == "each by itself":
            RayGrid.start = classmethod(  # type: ignore[assignment, method-assign]
                lambda cls, *known: whole(*known[:7], False)
            )
        with tempfile.TemporaryDirectory() as place:
            run = train.train(compose("config", [*words, f"run_dir={place}/run"]))
            results = json.loads((Path(run) / "results.json").read_text())
        result[name] = {
            "clients": clients,
            "sums": name,
            "round_seconds": round(results["seconds_per_round"]["routing"], 1),
            "arrived_bytes": arrived[name],
            "generator": results["generator_sha256"][:16],
        }
        print(json.dumps(result[name]), flush=True)
    first, second = result.values()
    assert first["generator"] == second["generator"]
    ratio = second["arrived_bytes"] / first["arrived_bytes"]
    print(json.dumps({"bytes_by_itself_over_added_up": ratio}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--numbers", type=int, default=100_000)
    parser.add_argument("--dropouts", type=float, nargs="*", default=[0.0, 0.01, 0.1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ray", type=int, help="clients of a round on Ray")
    chosen = parser.parse_args()
    if chosen.ray:
        on_ray(chosen.ray)
        return
    for clients in chosen.clients:
        masks(clients, chosen.numbers, chosen.dropouts, chosen.repeats)


if __name__ == "__main__":
    main()
