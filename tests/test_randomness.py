"""Random streams: the distribution of each kind, and the separation of domains and modes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from scipy import stats

from fedgen.randomness import RandomStreams

places = st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=3)), max_size=4).map(tuple)


@given(places, places)
def test_domains_have_different_streams(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    streams = RandomStreams.from_seed(0, "seeded")
    same = np.array_equal(streams.noise_bits(8, *first), streams.noise_bits(8, *second))
    assert same == (first == second and [type(x) for x in first] == [type(x) for x in second])


@given(places, places)
def test_nested_domains_equal_joined_ones(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    streams = RandomStreams.from_seed(3, "seeded")
    walked = streams.at(*first).at(*second).secret("x").random()
    assert walked == streams.secret(*first, *second, "x").random()


@kills(
    "fedgen/randomness.py",
    "secrets.token_bytes(32), secrets.token_bytes(32), mode)",
    'derived(b"secret"), derived(b"noise"), mode)',
)
def test_seeded_streams_repeat_and_secure_ones_do_not() -> None:
    def draws(streams: RandomStreams) -> tuple[float, float, int]:
        public = int(torch.randint(2**60, (), generator=streams.public("a")))
        return streams.secret("a").random(), int(streams.noise_bits(1, "a")[0]), public

    assert draws(RandomStreams.from_seed(5, "seeded")) == draws(
        RandomStreams.from_seed(5, "seeded")
    )
    first, second = (
        draws(RandomStreams.from_seed(5, "secure")),
        draws(RandomStreams.from_seed(5, "secure")),
    )
    assert first[2] == second[2], "public streams follow from the seed in both modes"
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_stored_key_repeats_samples() -> None:
    """Neither noise nor public streams depend on it."""
    key = bytes(range(32))
    first, second = (RandomStreams.from_seed(5, "secure").with_secret_key(key) for _ in range(2))
    assert first.secret("cohort", 3).random() == second.secret("cohort", 3).random()
    assert first.noise_bits(1, "a") != second.noise_bits(1, "a")
    assert first.noise_key != key


def test_a_stream_is_aes_in_counter_mode_and_its_bits_are_fair() -> None:
    """Across block boundaries; each of 64 bits of 100,000 words is fair, at level 1e-6 in total."""
    words = RandomStreams.from_seed(0, "seeded").noise_bits(100_000, "x")
    assert np.array_equal(words[:4], RandomStreams.from_seed(0, "seeded").noise_bits(4, "x"))
    assert len(np.unique(words)) == len(words)
    ones = [int((words >> np.uint64(bit) & np.uint64(1)).sum()) for bit in range(64)]
    low, high = stats.binom.interval(1 - 1e-6 / 64, 100_000, 0.5)
    assert all(low <= count <= high for count in ones)


@kills("fedgen/randomness.py", "noise_key=secrets.token_bytes(32)", "noise_key=self.noise_key")
@kills("fedgen/randomness.py", "self.secret_key + charged.to_bytes", "charged.to_bytes")
@kills("fedgen/randomness.py", "charged.to_bytes(8", "(0).to_bytes(8")
def test_responses_share_no_noise_and_no_samples() -> None:
    """In mode ``secure``, noise is never shared, and only responses to queries between the same two
    charges share samples. In mode ``seeded`` both depend on the query, so that a run repeats."""
    noise, samples, public = {}, {}, {}
    for mode in ("secure", "seeded"):
        client = RandomStreams.from_seed(0, mode).at("client", 0)  # type: ignore[arg-type]
        streams = [
            client.at_release(charged).for_release(query) for charged in (0, 1) for query in "aab"
        ]
        noise[mode] = len({int(stream.noise_bits(1, "x")[0]) for stream in streams})
        samples[mode] = len({int(stream.secret_bits(1, "x")[0]) for stream in streams})
        public[mode] = len({stream.public("x").initial_seed() for stream in streams})
    assert noise == {"secure": 6, "seeded": 2}
    assert samples == {"secure": 2, "seeded": 2}
    assert public == {"secure": 1, "seeded": 1}
    other = RandomStreams.from_seed(0, "secure").at_release(0).secret_bits(1, "x")
    assert other != RandomStreams.from_seed(0, "secure").at_release(0).secret_bits(1, "x")


def test_kinds_do_not_share_a_stream(streams: RandomStreams) -> None:
    assert len({streams.public_key, streams.secret_key, streams.noise_key}) == 3


@kills(
    "fedgen/randomness.py",
    "return _words(self.secret_key, self._salted(self.secret_domain, domain), count)",
    "return _words(self.public_key, self._salted(self.secret_domain, domain), count)",
)
def test_many_secret_uniforms_are_secret_and_uniform() -> None:
    """They follow from the secret key alone, and pass Kolmogorov-Smirnov at level 1e-6."""
    seeded, secure = RandomStreams.from_seed(0, "seeded"), RandomStreams.from_seed(0, "secure")
    first = seeded.at("a").secret_uniforms(20_000, "batch")
    assert np.array_equal(
        first, RandomStreams.from_seed(0, "seeded").at("a").secret_uniforms(20_000, "batch")
    )
    for other in (
        secure.at("a").secret_uniforms(20_000, "batch"),
        seeded.at("b").secret_uniforms(20_000, "batch"),
        seeded.at("a").salted("x").secret_uniforms(20_000, "batch"),
    ):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.04
        assert stats.kstest(other, "uniform").pvalue > 1e-6


def test_secret_integers_are_uniform(streams: RandomStreams) -> None:
    """Chi-square at level 1e-6 over single values in 20,000 domains."""
    counts = [0] * 10
    for place in range(20_000):
        [member] = streams.secret("draw", place).sample(range(10), 1)
        counts[member] += 1
    assert stats.chisquare(counts).pvalue > 1e-6


@kills("fedgen/randomness.py", "secret_domain=(*self.secret_domain, name))", "salt='')")
def test_secret_samples_of_a_response_do_not_depend_on_its_round() -> None:
    """In mode ``secure``: a death may take a run back to an earlier round."""
    secret, public = {}, {}
    for mode in ("secure", "seeded"):
        client = RandomStreams.from_seed(0, mode).at_release(3)  # type: ignore[arg-type]
        streams = [client.at_round("sum", round_).at("step", 1) for round_ in (4, 7)]
        secret[mode] = len({int(stream.secret_bits(1, "x")[0]) for stream in streams})
        public[mode] = len({stream.public("x").initial_seed() for stream in streams})
        other = client.at_round("sum", 4).at("step", 2)
        assert other.secret_bits(1, "x") != streams[0].secret_bits(1, "x")
    assert secret == {"secure": 1, "seeded": 2}
    assert public == {"secure": 2, "seeded": 2}
    seeded = RandomStreams.from_seed(0, "seeded")
    domains = seeded.at_round("sum", 4), seeded.at("sum", 4)
    assert domains[0].secret_bits(1, "x") == domains[1].secret_bits(1, "x")
