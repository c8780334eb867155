"""Masked sums are exact or refused, and the server sees nothing else."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from scipy import stats

from fedgen.federation.secagg import masking, secret_sharing
from fedgen.federation.secagg.masking import (
    Masker,
    MaskingError,
    Words,
    build_graph,
    stream,
    unmask,
)
from fedgen.privacy.aggregation import Secure

FIVE = Secure(5, 4, 1)
WORDS = 400


def cohort(sums: Secure, context: bytes = b"run/1") -> dict[int, Masker]:
    return {client: Masker(client, sums, context) for client in range(sums.asked)}


def vectors(count: int, words: int = WORDS, bits: int = 32) -> dict[int, Words]:
    rng, kind = np.random.default_rng(1), np.uint32 if bits == 32 else np.uint64
    return {c: rng.integers(0, 2**bits, words, dtype=kind) for c in range(count)}


class Played:
    """A round. ``after``: clients that drop out after keys, shares or responses."""

    def __init__(
        self, sums: Secure, after: tuple[Iterable[int], Iterable[int], Iterable[int]] = ((), (), ())
    ) -> None:
        self.sums, self.maskers, self.words = (
            sums,
            cohort(sums),
            vectors(sums.asked, bits=sums.bits),
        )
        no_shares, no_words, no_reveal = (set(each) for each in after)
        self.keys = {c: each.announce() for c, each in self.maskers.items()}
        self.dealt = {
            c: each.seal_shares(self.keys) for c, each in self.maskers.items() if c not in no_shares
        }
        self.masked = {
            c: self.maskers[c].mask(self.words[c])
            for c in self.dealt
            if c not in no_words and self.maskers[c].open(self.inbox(c)) == []
        }
        self.answered, self.silent = set(self.masked), set(self.dealt) - set(self.masked)
        self.revealed = {
            c: self.maskers[c].reveal(self.answered, self.silent) for c in self.answered - no_reveal
        }

    def inbox(self, client: int) -> dict[int, bytes]:
        return {c: each[client] for c, each in self.dealt.items() if client in each}

    def sum(
        self, value: dict[int, dict[int, bytes]] | None = None
    ) -> tuple[Words, dict[int, set[int]]]:
        """Return the sum, and who revealed a wrong share of whose secret."""
        total = np.sum(list(self.masked.values()), axis=0, dtype=f"u{self.sums.bits // 8}")
        shares = self.revealed if value is None else value
        return unmask(total, self.keys, self.answered, self.silent, shares, self.sums, b"run/1")

    def right(self, value: dict[int, dict[int, bytes]] | None = None) -> bool:
        kind = f"u{self.sums.bits // 8}"
        expected = np.sum([self.words[c] for c in self.answered], axis=0, dtype=kind)
        return np.array_equal(self.sum(value)[0], expected)


@kills(
    "fedgen/federation/secagg/masking.py",
    "(np.add if self.client < other else np.subtract)(masked",
    "(np.add if self.client != other else np.subtract)(masked",
)
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.data())
def test_the_sum_is_that_of_the_responders_or_refused(asked: int, data: st.DataObject) -> None:
    """For any dropouts at any stage: the exact sum, if as many respond as the noise counts on and
    enough help to unmask; otherwise an error."""
    threshold = data.draw(st.integers(asked // 2 + 1, asked))
    sums = Secure(asked, threshold, data.draw(st.integers(0, threshold - 1)))
    drops = [data.draw(st.sampled_from(["", "shares", "words", "reveal"])) for _ in range(asked)]
    gone = tuple([c for c, d in enumerate(drops) if d == s] for s in ("shares", "words", "reveal"))
    answering = sum(d in ("", "reveal") for d in drops)
    try:
        played = Played(sums, gone)
        assert played.right()
    except MaskingError:
        helping = max(asked // 2, sums.colluders) + 1  # as many as give a secret back
        assert answering < threshold or answering - len(gone[2]) < helping
    else:
        assert answering >= threshold


@pytest.mark.parametrize("bits", [32, 64])
def test_sums_of_both_word_sizes_are_unmasked(bits: int) -> None:
    assert Played(Secure(7, 5, 1, bits), ([1], [4], [])).right()  # type: ignore[arg-type]


@kills(
    "fedgen/federation/secagg/masking.py",
    "result - mask if other < client else result + mask",
    "result + mask if other < client else result - mask",
    case="0.1",
)
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1])
def test_a_hundred_clients_drop_out_at_each_stage(rate: float) -> None:
    rng = np.random.default_rng(2)
    gone = tuple(np.flatnonzero(rng.random(100) < rate).tolist() for _ in range(3))
    assert Played(Secure(100, 67, 10), gone).right()


@pytest.mark.slow
def test_many_clients_have_few_neighbours_and_the_sum_is_exact() -> None:
    """400 clients: each sends shares to some of them, and the graph stays connected without 5 %."""
    sums = Secure(400, 300, 20)
    played = Played(sums, ([3, 77], range(100, 110), [200, 201, 399]))
    assert played.right()
    net = build_graph(played.keys, sums)
    assert net.degree < 200
    assert all(len(set(net.neighbours(c))) == net.degree + 1 for c in range(400))
    assert all(c in net.neighbours(o) for c in range(0, 400, 37) for o in net.neighbours(c))


def test_the_order_of_the_ring_takes_one_hash_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each client, only its number is hashed after them: n log n work, not n squared."""
    keys = {client: bytes([client % 256, client // 256]) * 32 for client in range(500)}
    every = b"".join(client.to_bytes(8, "big") + keys[client] for client in sorted(keys))
    places = {c: hashlib.sha256(every + c.to_bytes(8, "big")).digest() for c in keys}
    hashed, real = [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data=b"": hashed.append(len(data)) or real(data))
    order = build_graph(keys, Secure(500, 334, 20)).order
    assert sum(hashed) == len(every)
    assert list(order) == sorted(keys, key=places.__getitem__)


@kills(
    "fedgen/federation/secagg/masking.py",
    "if disconnected < _MAX_FAILURE and captured < _MAX_FAILURE:",
    "if captured < _MAX_FAILURE:",
)
@pytest.mark.parametrize(("asked", "threshold", "colluders"), [(200, 134, 0), (1000, 667, 50)])
def test_the_degree_keeps_the_ring_connected_and_neighbourhoods_honest(
    asked: int, threshold: int, colluders: int
) -> None:
    """Recomputed by logarithms of binomials, and by exact tails."""
    degree = masking._degree(asked, threshold, colluders)
    bad, half = asked - threshold + colluders + 1, degree // 2

    def choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    run = choose(bad, half) - choose(asked, half) + math.log(asked)
    assert (
        run <= -60 * math.log(2) < choose(bad, half - 1) - choose(asked, half - 1) + math.log(asked)
    )
    ways = math.comb(asked - 1, degree)
    caught = sum(
        math.comb(colluders, k) * math.comb(asked - 1 - colluders, degree - k)
        for k in range(half + 1, min(colluders, degree) + 1)
    )
    assert asked * caught * 2**60 < ways


@kills(
    "fedgen/federation/secagg/masking.py",
    "else _degree(len(keys), sums.threshold, sums.colluders)",
    "else min(_degree(sums.asked, sums.threshold, sums.colluders), len(keys) - 1)",
)
@pytest.mark.parametrize(
    ("asked", "threshold", "colluders"),
    [(300, 200, 100), (500, 334, 150), (1000, 667, 200), (1000, 600, 50), (10, 8, 4), (10, 9, 5)],
)
def test_colluders_stay_below_the_threshold_if_few_announce_keys(
    asked: int, threshold: int, colluders: int
) -> None:
    """All colluders may be present and honest clients absent: in no neighbourhood, except with
    probability 2^-60, do they reach the threshold."""
    sums = Secure(asked, threshold, colluders)
    for count in {threshold, (threshold + asked) // 2, asked}:
        net = build_graph({c: bytes([c % 256, c // 256]) * 32 for c in range(count)}, sums)
        if net.degree == count - 1:
            assert net.shamir > colluders
            continue
        ways = math.comb(count - 1, net.degree)
        caught = sum(
            math.comb(colluders, k) * math.comb(count - 1 - colluders, net.degree - k)
            for k in range(net.shamir, min(colluders, net.degree) + 1)
        )
        assert count * caught * 2**60 < ways


@kills(
    "fedgen/federation/secagg/masking.py",
    "masked = words + stream(self._seed, len(words), words.dtype)",
    "masked = words.copy()",
)
def test_masked_words_are_uniform() -> None:
    """Chi-squared over 256 bins at level 1e-6, of what the server sees of zeros: single vectors,
    their differences, and a vector without the masks that it shares with others, whose own mask
    remains (a late response, whose neighbours revealed theirs)."""
    sums = Secure(5, 4, 0)
    maskers = cohort(sums)
    keys = {c: each.announce() for c, each in maskers.items()}
    dealt = {c: each.seal_shares(keys) for c, each in maskers.items()}
    zeros = np.zeros(20_000, np.uint32)
    for c, each in maskers.items():
        assert each.open({o: dealt[o][c] for o in dealt if o != c}) == []
    masked = {c: each.mask(zeros) for c, each in maskers.items()}
    late = masked[0].copy()
    for other in range(1, 5):
        late -= stream(maskers[0]._mask_key_with(other), len(late), late.dtype)
    seen = [*masked.values(), masked[0] - masked[1], late, late - masked[2]]
    for each in seen:
        counts = np.bincount(each >> np.uint32(24), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
        assert len(np.unique(each)) > 0.999 * len(each)


@kills(
    "fedgen/federation/secagg/masking.py",
    'b"mask" + _names(*sorted((one, other))) + context',
    'b"mask" + _names(*sorted((one, other)))',
)
@kills(
    "fedgen/federation/secagg/masking.py",
    "Cipher(AES256(key), CTR(bytes(16)))",
    "Cipher(AES256(key[:4] * 8), CTR(key[:8] * 2))",
)
def test_masks_are_those_of_aes() -> None:
    """A known answer, because no test of sums detects a weak generator: AES-256-CTR of zeros under
    a zero key."""
    known = "dc95c078a2408989ad48a21492842087"
    assert stream(bytes(32), 4, np.dtype(np.uint32)).tobytes().hex() == known
    key = bytes(range(32))
    block = Cipher(AES256(key), ECB()).encryptor().update((1).to_bytes(16, "big"))
    assert stream(key, 8, np.dtype(np.uint32))[4:].tobytes() == block
    pair = cohort(FIVE)
    keys = {c: each.announce() for c, each in pair.items()}
    for each in pair.values():
        each.seal_shares(keys)
    assert pair[0]._mask_key_with(1) == pair[1]._mask_key_with(0)
    other = Masker(0, FIVE, b"run/2", pair[0]._mask_key, pair[0]._box_key)
    other.seal_shares({**keys, 0: other.announce()})
    assert pair[0]._mask_key_with(1) != other._mask_key_with(1)


@kills(
    "fedgen/federation/secagg/masking.py",
    'b"mask" + _names(*sorted((one, other))) + context',
    'b"mask" + context',
)
@pytest.mark.parametrize("variant", ["bit 255", "point of order 2", "the key itself"])
def test_a_variant_of_a_key_shares_no_mask_with_it(variant: str) -> None:
    """X25519 agrees on the same secret for such keys; equal masks would cancel, and a colluder that
    announced one would learn the sum of fewer clients."""
    maskers = cohort(FIVE)
    keys = {c: each.announce() for c, each in maskers.items()}
    own = keys[0][:32]
    if variant == "bit 255":
        own = bytes([*own[:31], own[31] ^ 0x80])
    elif variant == "point of order 2":
        prime = 2**255 - 19
        own = pow(int.from_bytes(own, "little"), -1, prime).to_bytes(32, "little")
    keys[4] = own + keys[4][32:]
    maskers[1]._keys = keys
    private = maskers[1]._mask_private_key
    assert masking._agree(private, keys[0][:32]) == masking._agree(private, keys[4][:32])
    assert maskers[1]._mask_key_with(0) != maskers[1]._mask_key_with(4)


@kills(
    "fedgen/federation/secagg/secret_sharing.py",
    "    if len(shares) < threshold:\n",
    "    if len(shares) < 1:\n",
)
@kills(
    "fedgen/federation/secagg/secret_sharing.py",
    "for _ in range(threshold - 1)]",
    "for _ in range(0)]",
)
def test_shares_below_the_threshold_reveal_nothing() -> None:
    """Any three of five reconstruct the secret; two are consistent with every secret."""
    secret = bytes(range(32))
    shares = secret_sharing.split_secret(secret, 3, 5)
    for some in itertools.combinations(range(5), 3):
        result, bad = secret_sharing.recover_secret(
            {x + 1: shares[x] for x in some}, 3, secret.__eq__
        )
        assert (result, bad) == (secret, [])
    with pytest.raises(ValueError, match="too few shares"):
        secret_sharing.recover_secret({1: shares[0], 2: shares[1]}, 3, secret.__eq__)
    firsts = [secret_sharing.split_secret(secret, 2, 3)[0][-1] for _ in range(2000)]
    assert stats.chisquare(np.bincount(np.array(firsts) >> 4, minlength=16)).pvalue > 1e-6


@kills(
    "fedgen/federation/secagg/masking.py",
    "return _commitment(secret, context) == text[64:]",
    "return len(secret) == 32",
)
@settings(max_examples=60, deadline=None)
@given(st.integers(3, 9), st.data())
def test_wrong_shares_are_excluded_or_the_sum_is_refused(asked: int, data: st.DataObject) -> None:
    """For any false shares: the exact sum, or an error if fewer than ``shamir`` are correct. No
    honest client is named unless there are too many false shares."""
    threshold = data.draw(st.integers(asked // 2 + 1, asked - 1))
    silent = data.draw(st.sets(st.integers(0, asked - 1), max_size=asked - threshold))
    played = Played(Secure(asked, threshold, 0), ((), silent, ()))
    helpers = sorted(played.revealed)
    liars = data.draw(st.sets(st.sampled_from(helpers)))
    result = {c: dict(each) for c, each in played.revealed.items()}
    for liar in liars:
        lies = data.draw(st.sets(st.sampled_from(sorted(result[liar])), min_size=1))
        for about in lies:
            other = data.draw(st.sampled_from([1, 2**255]))
            share = int.from_bytes(result[liar][about], "big") ^ other
            result[liar][about] = share.to_bytes(33, "big")
    shamir = build_graph(played.keys, played.sums).shamir
    try:
        assert played.right(result)
    except MaskingError:
        assert len(helpers) - len(liars) < shamir
    else:
        named = played.sum(result)[1]
        if len(liars) + len(named) < len(helpers) - shamir + 2:
            assert named.keys() <= liars


def test_one_wrong_share_among_the_first_is_named() -> None:
    played = Played(Secure(6, 5, 0), ((), (5,), ()))
    liar = build_graph(played.keys, played.sums).neighbours(0)[0]
    liar = (
        liar if liar in played.revealed else build_graph(played.keys, played.sums).neighbours(0)[1]
    )
    about = 5  # the key of one that is silent
    result = {c: dict(each) for c, each in played.revealed.items()}
    result[liar][about] = bytes(33)
    assert played.right(result)
    assert played.sum(result)[1] == {liar: {about}}


def test_inconsistent_shares_of_a_dealer_void_the_sum() -> None:
    """The dealer and its helpers cannot be distinguished, and the error says so."""
    played = Played(FIVE)
    result = {helper: {**each, 2: bytes(33)} for helper, each in played.revealed.items()}
    with pytest.raises(MaskingError, match=r"client 2 do not match .* this client or"):
        played.sum(result)


def refused(act: Callable[[], object]) -> bool:
    try:
        act()
    except MaskingError:
        return True
    return False


@kills(
    "fedgen/federation/secagg/masking.py",
    "if responders & dropouts or self.client not in responders:",
    "if self.client not in responders:",
)
@kills(
    "fedgen/federation/secagg/masking.py",
    "        if self._revealed:",
    "        if self._revealed is None:",
)
@kills(
    "fedgen/federation/secagg/masking.py",
    "and bool(self._shares) and not self._used",
    "and bool(self._shares)",
)
@kills(
    "fedgen/federation/secagg/masking.py",
    "if len(responders) < self.sums.threshold or not",
    "if not",
)
@kills(
    "fedgen/federation/secagg/masking.py",
    "            self._shares.clear()",
    "            self._shares.copy()",
)
@kills("fedgen/federation/secagg/masking.py", "if len(set(flat)) < len(flat) or any(", "if any(")
def test_protocol_violations_are_refused() -> None:
    played = Played(FIVE, ((), (), ()))
    one = played.maskers[0]
    assert refused(lambda: one.reveal(range(5), []))  # a second time
    assert refused(lambda: one.mask(played.words[0]))  # two vectors, one mask
    assert refused(lambda: one.open(played.inbox(0)))
    assert refused(lambda: one.seal_shares(played.keys))
    few = {helper: played.revealed[helper] for helper in (0, 1)}
    assert refused(lambda: played.sum(few))  # fewer than the threshold help

    def fresh() -> tuple[Masker, dict[int, bytes], dict[int, bytes]]:
        maskers = cohort(FIVE)
        keys = {c: each.announce() for c, each in maskers.items()}
        dealt = {c: each.seal_shares(keys) for c, each in maskers.items()}
        return maskers[0], keys, {o: dealt[o][0] for o in range(1, 5)}

    one, _, inbox = fresh()
    assert refused(lambda: one.reveal(range(5), []))  # before its own words
    assert refused(lambda: one.mask(played.words[0]))  # no shares were opened
    assert one.open(inbox) == []
    one.mask(played.words[0])
    assert refused(lambda: one.reveal([0, 1, 2, 3], [3, 4]))  # both secrets of one client
    assert refused(lambda: one.reveal([0, 1, 2], [3, 4]))  # less noise than was counted
    assert refused(lambda: one.reveal([1, 2, 3, 4], [0]))  # its own words left
    assert refused(lambda: one.reveal([0, 1, 2, 3], []))  # a neighbour is on no list
    assert refused(lambda: one.reveal([0, 1, 2, 3, 9], [4]))  # a stranger
    one, _, inbox = fresh()
    broken = {**inbox, 1: inbox[1][:-1] + bytes([inbox[1][-1] ^ 1])}
    assert one.open(broken) == [1]
    assert refused(lambda: one.mask(played.words[0]))
    one, _, inbox = fresh()
    _, _, others = fresh()  # dealt under other keys, as by clients that announced anew
    assert one.open({**inbox, 1: others[1]}) == [1]
    one, _, inbox = fresh()
    swapped = {**inbox, 1: inbox[2], 2: inbox[1]}
    assert one.open(swapped) == [1, 2]
    assert refused(lambda: one.mask(played.words[0]))

    def dealing(change: Callable[[dict[int, bytes]], dict[int, bytes]]) -> bool:
        maskers = cohort(FIVE)
        keys = {c: each.announce() for c, each in maskers.items()}
        return refused(lambda: maskers[0].seal_shares(change(keys)))

    assert not dealing(lambda keys: keys)
    assert dealing(lambda keys: {**keys, 1: keys[2]})  # one client twice
    assert dealing(lambda keys: {**keys, 0: keys[0][::-1]})  # not my keys
    assert dealing(lambda keys: {c: keys[c] for c in (0, 1, 2)})  # too few
    assert dealing(lambda keys: {**keys, 9: bytes(range(64))})  # more than were to be asked
    assert dealing(lambda keys: {**keys, 1: bytes(64)})  # no key at all


def test_secrets_of_a_client_are_not_pickled_or_printed() -> None:
    one = cohort(FIVE)[0]
    assert one._seed.hex() not in repr(one) and repr(one._seed) not in repr(one)
