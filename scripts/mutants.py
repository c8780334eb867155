"""Breaks fedgen on purpose, one way at a time, and runs the tests that should notice.

    python scripts/mutants.py [--tests-passed] [NAME ...]

Each mutant is one change to one file, of a kind that has gone wrong in published code. It is put
into a copy of the package; a test that is meant for it must fail there, and must pass without it
(which is tried as well, unless the whole suite has just passed).
Prints a line for each, ``killed NAME by TEST`` or ``survived NAME``; exits with 1 if any survived.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAZY = ("torch.utils.tensorboard", "matplotlib.backends.backend_agg", "sklearn.datasets", "ray")
OWN = ("fedgen", "conftest", "tiny")
PLAIN = ("-x", "-q", "--tb=native", "--assert=plain", "-p", "no:cacheprovider")
COPIED = ("fedgen", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A change that a test must notice: ``old``, found once in ``file``, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    test: str


MECHANISMS, TESTS = "fedgen/privacy/mechanisms.py", "tests/privacy/test_mechanisms.py"
RELEASES, RELEASE_TESTS = "fedgen/privacy/releases.py", "tests/privacy/test_releases.py"
MASKING, MASKING_TESTS = "fedgen/federation/masking.py", "tests/federation/test_masking.py"
SUM_TESTS = "tests/federation/test_sums.py"
ACCOUNTS = "fedgen/experiments/accounts.py"
ACCOUNT_TESTS = "tests/experiments/test_accounts.py"
PER_EXAMPLE = "fedgen/privacy/per_example.py"
LAYERS = "fedgen/privacy/layers.py"
PER_EXAMPLE_TESTS = "tests/privacy/test_per_example.py"
CLIENT, CLIENT_TESTS = "fedgen/federation/client_app.py", "tests/federation/test_client_app.py"
DP_MERF_TESTS = "tests/methods/test_dp_merf.py"
FEDAVG_TESTS = "tests/methods/test_fedavg_gan.py"
SEQUENCE = "fedgen/sequence.py"
MIXTURE, MIXTURE_TESTS = "fedgen/methods/mixture.py", "tests/methods/test_mixture.py"
NOISE, NOISE_TESTS = "fedgen/privacy/noise.py", "tests/privacy/test_noise.py"
TRAINING = "fedgen/experiments/training.py"
INCIDENTS = "tests/federation/test_draws_and_incidents.py"
FOREIGN_FILES = "tests/robustness/test_foreign_files.py"
SPENT = "tests/privacy/test_spent.py"
LYING_CLIENTS = "tests/robustness/test_lying_clients.py"
CRITICS, ANSWERING = "fedgen/ensemble/critics.py", "fedgen/ensemble/answering.py"
BOUNDS, BOUNDS_TESTS = "fedgen/privacy/bounds.py", "tests/privacy/test_bounds.py"
GS_WGAN_TESTS, VOTES_TESTS = "tests/methods/test_gs_wgan.py", "tests/methods/test_votes.py"
ROUTING, ROUTING_TESTS = "fedgen/privacy/routing.py", "tests/privacy/test_routing.py"

POLICY, SITE = "fedgen/deployment/policy.py", "fedgen/deployment/site.py"
SITE_TESTS, SIGNING_TESTS = "tests/deployment/test_site.py", "tests/federation/test_signing.py"
PERSONS_TESTS = "tests/privacy/test_persons.py"
FAULT_TESTS = "tests/federation/test_faults.py"
LONGER_TESTS = "tests/federation/test_longer.py"
WARM_UP, WARM_UP_TESTS = "fedgen/warm_up.py", "tests/methods/test_warm_up.py"

MUTANTS = [
    Mutant(
        "rows-move-each-other-by-rounding",
        "fedgen/privacy/exact.py",
        "    return (left @ right) * (left_grid * right_grid)",
        "    return rows.double() @ matrix.double()",
        "tests/privacy/test_exact.py::test_no_order_of_adding_up_is_another_sum",
    ),
    Mutant(
        "sums-of-products-that-a-double-does-not-hold",
        "fedgen/privacy/exact.py",
        "_BITS = 53 ",
        "_BITS = 58 ",
        "tests/privacy/test_exact.py::test_no_order_of_adding_up_is_another_sum",
    ),
    Mutant(
        "what-rounding-leaves-of-a-row-is-made-one-long",
        "fedgen/methods/teacher.py",
        "product(some.double() - mean, directions, (_APART, longest))",
        # as processors' products of floats do, each in its own way
        "(some.double() - mean) @ directions + 1e-9 * (-1) ** len(some)",
        f"{MIXTURE_TESTS}::test_directions_of_a_hostile_server_do_not_move_other_rows",
    ),
    Mutant(
        "a-run-is-begun-through-a-link",
        "fedgen/reporting/run_dir.py",
        "if stat.S_ISLNK(kind.st_mode) or (stat.S_ISREG(kind.st_mode) and kind.st_nlink > 1):",
        "if False:",
        "tests/reporting/test_reporting.py::test_nothing_is_written_through_a_link",
    ),
    Mutant(
        "two-runs-make-one-folder",
        "fedgen/reporting/run_dir.py",
        "if not _locked(held, fcntl.LOCK_EX) or not _is_free(path):",
        "if False:",
        "tests/reporting/test_reporting.py::test_of_many_that_begin_in_one_folder_at_once_one_does",
    ),
    Mutant(
        "the-nearest-cluster-depends-on-the-rows-beside-it",
        MIXTURE,
        "along = product(places[mine], own.T, (self.longest, self.longest))",
        # as processors' products of floats do, each in its own way
        "along = product(places[mine], own.T, (self.longest, self.longest))"
        " * (1 + 1e-5 * (-1) ** len(places))",
        f"{MIXTURE_TESTS}::test_a_row_between_two_clusters_stays_where_it_is",
    ),
    Mutant(
        "what-a-failure-showed-is-not-in-the-account",
        "fedgen/experiments/spent.py",
        "canonical(ready.with_gaps().plan.server(ready.privacy.budget.rows))",
        "canonical(ready.method.plan.server(ready.privacy.budget.rows))",
        f"{FAULT_TESTS}::test_what_a_failure_showed_counts_before_the_run_goes_on",
    ),
    Mutant(
        "a-run-that-is-told-to-end-costs-what-it-did",
        "fedgen/experiments/training.py",
        "            state.rows = Counter(dict.fromkeys(range(self.clients), budget.rows))",
        "            pass",
        f"{LONGER_TESTS}::"
        "test_a_run_that_is_told_to_end_counts_as_if_it_had_gone_on[dpgan_small-seeded]",
    ),
    Mutant(
        "a-run-that-is-told-to-end-goes-beyond-what-a-gap-left",
        "fedgen/experiments/training.py",
        "        until = min(self._until or budget.rounds, budget.rounds)",
        "        until = self._until or budget.rounds",
        f"{FAULT_TESTS}::test_a_target_ends_a_run_whose_draws_were_shown",
    ),
    Mutant(
        "the-page-of-a-run-forgets-a-death",
        "fedgen/experiments/unfinished.py",
        """identity["run"]) or _died(ready, run_dir)""",
        """identity["run"])""",
        f"{FAULT_TESTS}::test_a_process_that_died_over_an_answer_may_have_shown_its_draw",
    ),
    Mutant(
        "a-partition-gives-a-row-away-twice",
        "fedgen/data/partition.py",
        "    if len(np.unique(whole)) < len(whole):",
        "    if False:",
        "tests/data/test_partition.py::test_what_cannot_be_is_refused",
    ),
    Mutant(
        "a-death-is-forgotten-by-the-next-process",
        CLIENT,
        "            (folder / _DIED).touch()",
        "            pass",
        f"{SITE_TESTS}::test_a_death_over_an_answer_is_not_forgotten_by_the_next_one",
    ),
    Mutant(
        "a-death-in-a-simulation-shows-no-draw",
        "fedgen/experiments/training.py",
        "            died = self._marks and a_client_died(self.run_dir)",
        "            died = False",
        f"{FAULT_TESTS}::test_a_process_that_died_over_an_answer_may_have_shown_its_draw",
    ),
    Mutant(
        "a-run-that-goes-on-forgets-a-death",
        "fedgen/experiments/training.py",
        "            if not new and ready.gaps_show and a_client_died(run_dir):",
        "            if False:",
        f"{FAULT_TESTS}::test_a_process_that_died_over_an_answer_may_have_shown_its_draw",
    ),
    Mutant(
        "a-gap-takes-a-run-beyond-its-budget",
        "fedgen/experiments/training.py",
        "        if gaps and not self._over:",
        "        if False:",
        f"{FAULT_TESTS}::test_a_gap_may_take_a_run_beyond_the_budget_of_its_data",
    ),
    Mutant(
        "a-node-lets-a-run-in-before-it-counts-a-death",
        "fedgen/deployment/site.py",
        "        _count_deaths(place)",
        "        pass",
        f"{SITE_TESTS}::test_what_a_death_showed_counts_before_another_run_is_let_in",
    ),
    Mutant(
        "a-nodes-log-has-secret-draws",
        "fedgen/deployment/node.py",
        "        return with_draws_seen(found) if self._place.showed_draws(name) else found",
        "        return found",
        f"{SITE_TESTS}::test_what_a_death_showed_counts_before_another_run_is_let_in",
    ),
    Mutant(
        "an-account-takes-back-what-was-shown",
        "fedgen/privacy/spent.py",
        "words = json.dumps(spend_to_json(with_told(most, [_most(file, run)[0] or {}])))",
        "words = json.dumps(spend_to_json(most))",
        "tests/privacy/test_spent.py::test_draws_that_were_shown_count_as_seen",
    ),
    Mutant(
        "an-own-partitions-rows-are-no-part-of-a-runs-coins",
        "fedgen/experiments/settings.py",
        """    if factories.is_outside(config.partition["_target_"]):""",
        "    if False:",
        "tests/experiments/test_branches.py::test_other_rows_by_an_own_partition_are_another_run",
    ),
    Mutant(
        "coins-of-a-rehearsal-at-another-scale",
        "fedgen/experiments/settings.py",
        "    if noise != in_short(noise_multiplier):",
        "    if False:",
        "tests/experiments/test_branches.py::test_a_deployment_uses_no_coins_at_another_scale",
    ),
    Mutant(
        "an-engines-process-has-other-rows",
        "fedgen/experiments/sites.py",
        """        check_same_rows(ready, run_dir, identity, "run_dir")""",
        "        pass",
        "tests/experiments/test_branches.py::test_other_processes_have_the_same_rows",
    ),
    Mutant(
        "a-site-forgets-that-it-died-over-an-answer",
        CLIENT,
        "        (folder / _ANSWERING).touch()",
        "        pass",
        f"{SITE_TESTS}::test_a_process_that_died_over_an_answer_hid_no_draw",
    ),
    Mutant(
        "what-a-sites-death-showed-is-not-in-its-account",
        "fedgen/deployment/site.py",
        "                place.account.widen(entry.run, with_draws_seen(entry.most))",
        "                pass",
        f"{SITE_TESTS}::test_a_process_that_died_over_an_answer_hid_no_draw",
    ),
    Mutant(
        "moments-go-from-one-stack-of-teachers-to-the-next",
        "fedgen/ensemble/critics.py",
        "            moments = self._here(state[name], True) if name in state else ",
        '            moments = changed.get(f"adam.{first - 1}") or ',
        f"{VOTES_TESTS}::test_one_record_changes_one_teacher_and_its_optimizer",
    ),
    Mutant(
        "a-step-more-than-counted",
        "fedgen/gradient_sums.py",
        "        return repeat(mechanism.event(), answered)",
        "        return repeat(mechanism.event(), max(1, answered - 1))",
        "tests/contracts/test_methods.py::TestEveryMethod::test_spend_stays_within_the_plan[psg_small-one]",
    ),
    Mutant(
        "votes-say-when-samples-are-drawn",
        "fedgen/experiments/diary.py",
        "        if is_due(state, facts, self._config.sample_every) or last:",
        "        if (facts.answer_norm or 0) % 1 > 0.5 or last:",
        f"{VOTES_TESTS}::test_votes_steer_no_rounds_and_name_no_files",
    ),
    Mutant(
        "all-images-of-a-round-are-one-vote",
        "fedgen/ensemble/answering.py",
        "        return repeat(mechanism.event(rows), answered // rows)",
        "        return repeat(mechanism.event(1), answered // rows)",
        f"{VOTES_TESTS}::test_each_image_is_an_event",
    ),
    Mutant(
        "a-run-that-died-and-does-not-go-on-had-secret-draws",
        "fedgen/experiments/spent.py",
        "        return ended_over_an_answer(RunDir(folder))",
        "        return False",
        f"{FAULT_TESTS}::test_a_run_that_died_is_charged_whether_it_goes_on_or_not",
    ),
    Mutant(
        "a-folder-that-is-gone-tells-that-nobody-died",
        "fedgen/experiments/spent.py",
        "        elif died is None:",
        "        elif False:",
        f"{FAULT_TESTS}::test_a_run_that_died_is_charged_whether_it_goes_on_or_not",
    ),
    Mutant(
        "a-run-that-is-not-over-has-secret-draws",
        "fedgen/experiments/unfinished.py",
        "            ready = ready.counting_gaps()",
        "            pass",
        f"{FAULT_TESTS}::test_what_a_failure_showed_counts_before_the_run_goes_on",
    ),
    Mutant(
        "a-target-is-spent-twice-where-draws-were-shown",
        "fedgen/experiments/planning.py",
        "    return replace(privacy, budget=budget)",
        "    return privacy",
        f"{FAULT_TESTS}::test_a_target_ends_a_run_whose_draws_were_shown",
    ),
    Mutant(
        "draws-count-as-secret-and-as-seen",
        "fedgen/privacy/ledger.py",
        "(with_draws_seen(each) if seen else each for each in found)",
        "found",
        f"{SPENT}::test_draws_that_were_shown_count_as_seen",
    ),
    Mutant(
        "an-account-by-the-order-of-rows",
        "fedgen/data/datasets.py",
        "each.encode() for each in sorted(self._digests)",
        "each.encode() for each in self._digests",
        f"{SPENT}::test_the_same_images_have_one_account",
    ),
    Mutant(
        "several-rows-of-a-person-cost-as-one",
        "fedgen/privacy/events.py",
        "    if size == 1:\n        return event\n",
        "    return event\n",
        f"{PERSONS_TESTS}::test_epsilon_is_the_second_accountants",
    ),
    Mutant(
        "draws-of-a-person-count-the-sum-of-their-rates",
        "fedgen/privacy/accounting.py",
        "    weights = binom.pmf(counts, event.size, event.sampling_probability)",
        "    weights = binom.pmf(counts, 1, event.sampling_probability)",
        f"{PERSONS_TESTS}::test_epsilon_is_the_second_accountants",
    ),
    Mutant(
        "a-mechanism-counts-a-persons-single-row",
        "fedgen/privacy/mechanisms.py",
        "return of_group(self.batches.event(GaussianDpEvent(self.noise_multiplier)), self.most)",
        "return self.batches.event(GaussianDpEvent(self.noise_multiplier))",
        f"{PERSONS_TESTS}::test_a_sum_has_the_law_that_is_counted",
    ),
    Mutant(
        "a-row-of-a-person-too-many",
        "fedgen/data/partition.py",
        "kept.append(np.sort(order[place < most]))",
        "kept.append(np.sort(order[place <= most]))",
        f"{PERSONS_TESTS}::test_without_a_person_everybody_elses_rows_are_the_same_ones",
    ),
    Mutant(
        "a-persons-rows-follow-from-where-they-lie",
        "fedgen/data/partition.py",
        "told = [keyed(key, content_of(images[row], int(labels[row]))) for row in shard]",
        "told = [keyed(key, content_of(images[0], int(row))) for row in shard]",
        f"{PERSONS_TESTS}::test_without_a_person_everybody_elses_rows_are_the_same_ones",
    ),
    Mutant(
        "two-answers-to-one-question-share-their-noise",
        "fedgen/coins.py",
        'return self.salted(secrets.token_hex(16) if self.mode == "secure" else question)',
        "return self.salted(question)",
        "tests/test_coins.py::test_answers_share_no_noise_and_no_draws",
    ),
    Mutant(
        "a-node-flips-the-same-coins-when-a-run-goes-on",
        "fedgen/deployment/node.py",
        "            if name not in self._homes or self._homes[name] is not None:",
        "            if name not in self._homes:",
        f"{SITE_TESTS}::test_a_round_that_is_done_again_is_charged_again",
    ),
    Mutant(
        "critics-by-place-where-an-image-moves-others",
        "fedgen/experiments/settings.py",
        "    if held.places.moves and by_place:",
        "    if held.places.moves and not by_place:",
        "tests/data/test_datasets.py::test_methods_that_count_on_places_refuse_rows_without_one",
    ),
    Mutant(
        "a-row-less-gives-others-to-other-clients",
        "fedgen/data/rows.py",
        "        told = keyed(key, content)",
        "        told = keyed(key, bytes(len(found)))",
        "tests/data/test_partition.py::test_without_a_row_all_others_stay",
    ),
    Mutant(
        "an-image-more-trains-on-others",
        "fedgen/data/folders.py",
        "replace(r, name=name) for r, name in zip(records, plain, strict=True)",
        'replace(r, name=name if max(counts.values()) < 2 else f"{r.label}/{name}")'
        " for r, name in zip(records, plain, strict=True)",
        "tests/data/test_folders.py::test_an_image_more_moves_no_other",
    ),
    Mutant(
        "an-account-of-what-is-trained-on-alone",
        "fedgen/data/datasets.py",
        "        test = [digest(image.tobytes()) for image in self.test_images]",
        "        test: list[str] = []",
        f"{SPENT}::test_a_folder_whose_files_have_other_names_has_one_account",
    ),
    Mutant(
        "persons-are-not-told-apart-in-the-account",
        "fedgen/privacy/spent.py",
        '"" if self.unit is Unit.RECORD else self.shares',
        'self.shares if self.unit is Unit.CLIENT else ""',
        f"{SPENT}::test_other_persons_or_clients_have_no_sum",
    ),
    Mutant(
        "clients-are-told-by-where-their-rows-lie",
        "fedgen/experiments/settings.py",
        "            return self.dataset.digest_of(self.shards)",
        "            return self.shares",
        f"{SPENT}::test_other_persons_or_clients_have_no_sum",
    ),
    Mutant(
        "angles-that-follow-from-the-rows-beside",
        "fedgen/methods/dp_merf.py",
        "self._of(product(images.flatten(1), frequencies, (1.0, longest)))",
        "self._of(images.flatten(1) @ frequencies)",
        f"{DP_MERF_TESTS}::test_angles_are_the_same_in_whatever_order_they_are_added_up",
    ),
    Mutant(
        "a-persons-rows-at-two-clients",
        "fedgen/data/partition.py",
        "    if len(np.unique(np.concatenate(homes))) < sum(map(len, homes)):",
        "    if not homes:",
        f"{PERSONS_TESTS}::test_persons_are_at_one_client",
    ),
    Mutant(
        "a-table-names-files-elsewhere",
        "fedgen/data/tables.py",
        "if home not in really.parents:",
        "if home is None:",
        "tests/data/test_tables.py::test_links_out_of_the_folder_are_not_followed",
    ),
    Mutant(
        "a-site-answers-above-its-epsilon",
        POLICY,
        "if cost.or_infinity > policy.epsilon:",
        "if cost.value is None:",
        f"{SITE_TESTS}::test_what_is_not_allowed_is_refused",
    ),
    Mutant(
        "a-site-puts-its-share-into-a-sum-without-masks",
        POLICY,
        "if not config.runtime.masks:",
        "if False:",
        f"{SITE_TESTS}::test_what_is_not_allowed_is_refused",
    ),
    Mutant(
        "the-coordinator-says-how-much-noise-there-is",
        SITE,
        "if in_short(found.noise) != request.noise_multiplier:",
        "if False:",
        f"{SITE_TESTS}::test_the_coordinators_word_for_the_noise_is_not_taken",
    ),
    Mutant(
        "a-request-names-a-folder-that-is-read",
        "fedgen/factories.py",
        "known = _by_group().get(group, frozenset())",
        "known = own()",
        f"{SITE_TESTS}::test_a_method_is_what_it_is_called",
    ),
    Mutant(
        "a-method-under-another-s-name",
        "fedgen/deployment/request.py",
        "if here != there:",
        "if False:",
        f"{SITE_TESTS}::test_a_method_is_what_it_is_called",
    ),
    Mutant(
        "one-share-stands-by-itself",
        MASKING,
        "if not heard & set(self._graph.around(self.me)) <= set(self._held):",
        "if False:",
        f"{SITE_TESTS}::test_no_share_stands_by_itself",
    ),
    Mutant(
        "masks-of-different-questions-cancel",
        MASKING,
        'return f"{run}/{server_round}/{asked}".encode()',
        'return f"{run}/{server_round}".encode()',
        f"{SITE_TESTS}::test_sites_that_are_asked_different_things_share_no_masks",
    ),
    Mutant(
        "keys-for-one-question-serve-another",
        CLIENT,
        "if masker.context != context:",
        "if False:",
        f"{SITE_TESTS}::test_another_question_than_keys_were_announced_for",
    ),
    Mutant(
        "sites-of-different-runs-share-masks",
        SITE,
        "about=request.text().encode(),",
        "",
        f"{SITE_TESTS}::test_sites_that_are_told_of_different_runs_share_no_masks",
    ),
    Mutant(
        "a-site-counts-what-the-coordinator-counts",
        SITE,
        "limits=most,",
        "limits=None,",
        f"{SITE_TESTS}::test_what_is_charged_is_bounded_and_not_what_the_coordinator_counts",
    ),
    Mutant(
        "the-server-chooses-who-is-between-two-silent-ones",
        CLIENT,
        "context, whole=terms.signer is not None)",
        "context)",
        f"{SIGNING_TESTS}::test_clients_that_sign_are_neighbours_of_all",
    ),
    Mutant(
        "training-tells-which-rows-there-are",
        CLIENT,
        "if home.terms.rehearsal is None:",
        "if True:",
        f"{SITE_TESTS}::test_training_fails_in_silence",
    ),
    Mutant(
        "a-draw-of-one-gaussian-loses-its-last-digit",
        "fedgen/privacy/events.py",
        "if isinstance(alone, GaussianDpEvent) and count == 1:",
        "if False:",
        "tests/privacy/test_events.py::test_what_is_canonical_stays_so",
    ),
    Mutant(
        "a-question-of-no-rows-is-free",
        CLIENT,
        "or query.count < 1",
        "or False",
        f"{SITE_TESTS}::test_what_is_charged_is_bounded_and_not_what_the_coordinator_counts",
    ),
    Mutant(
        "a-question-fails-on-private-labels-first",
        SITE,
        "rehearsal=_no_secret(public),",
        "",
        f"{SITE_TESTS}::test_a_question_that_fails_on_some_labels_meets_no_private_row",
    ),
    Mutant(
        "other-rows-begin-another-account",
        SITE,
        "Entry(request.run, _ROWS, _ROWS,",
        "Entry(request.run, rows.digest, _ROWS,",
        f"{SITE_TESTS}::test_rows_that_change_keep_their_account",
    ),
    Mutant(
        "one-name-stands-for-two-runs",
        SITE,
        "if path.exists() and (path.stat().st_size != len(now) or "
        "read_bounded(path, len(now)) != now):",
        "if False:",
        f"{SITE_TESTS}::test_a_run_stays_what_it_was",
    ),
    Mutant(
        "runs-on-a-sites-rows-do-not-add-up",
        "fedgen/deployment/site.py",
        "account.enter(entry, partial(check_budget, budget, privacy.delta), anew=gaps)",
        "account.enter(entry, lambda one, _: check_budget(budget, privacy.delta, one, []), gaps)",
        f"{SITE_TESTS}::test_all_runs_together_stay_within_a_budget",
    ),
    Mutant(
        "anybody-lets-nodes-in",
        "fedgen/deployment/flower_link.py",
        '_OPEN = ("/v1/fleet/", "/health")',
        '_OPEN = ("/v1/", "/health")',
        "tests/deployment/test_link.py::test_who_is_elsewhere_is_a_node_or_nobody",
    ),
    Mutant(
        "keys-of-a-client-that-the-server-invents",
        CLIENT,
        "signer.check(client, said, text[KEY_BYTES:])",
        "pass",
        f"{SIGNING_TESTS}::test_a_client_that_the_server_invents_is_noticed",
    ),
    Mutant(
        "peers-are-whoever-signs",
        "fedgen/federation/signing.py",
        "if self.peers is not None and self.peers.get(client) != _print_of(point):",
        "if False:",
        f"{SIGNING_TESTS}::test_a_client_that_the_server_invents_is_noticed",
    ),
    Mutant(
        "two-lists-are-signed-for-a-round",
        CLIENT,
        "if last == server_round and signed != text:",
        "if False:",
        f"{SIGNING_TESTS}::test_both_secrets_of_a_client_are_never_revealed",
    ),
    Mutant(
        "shares-are-revealed-on-the-servers-word",
        CLIENT,
        "if len(signers) < signers_needed(masker.sums):",
        "if False:",
        f"{SIGNING_TESTS}::test_both_secrets_of_a_client_are_never_revealed",
    ),
    Mutant(
        "as-many-signatures-as-answers-rule-another-list-out",
        "fedgen/federation/signing.py",
        "return max(sums.threshold, (sums.asked + sums.colluders) // 2 + 1)",
        "return sums.threshold",
        f"{SIGNING_TESTS}::test_two_lists_would_need_an_honest_client_that_signed_both",
    ),
    Mutant(
        "a-signature-serves-every-round",
        "fedgen/federation/signing.py",
        'return _text(b"keys", context, about,',
        'return _text(b"keys", about,',
        f"{SIGNING_TESTS}::test_keys_serve_one_round_of_one_run_and_cohort",
    ),
    Mutant(
        "rows-of-a-client-are-drawn-and-hide-it",
        MECHANISMS,
        """        return GaussianDpEvent(self.noise_multiplier)

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:""",
        """        return self.batches.event(GaussianDpEvent(self.noise_multiplier))

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:""",
        f"{TESTS}::test_a_clients_mean_is_in_the_ball_whatever_rows_it_has",
    ),
    Mutant(
        "a-client-of-many-rows-contributes-more",
        MECHANISMS,
        "return clip_rows(total[None] / max(rows, 1), self.clip)[0]",
        "return total / self.expected",
        f"{TESTS}::test_a_clients_mean_is_in_the_ball_whatever_rows_it_has",
    ),
    Mutant(
        "what-a-warm-up-asks-is-not-counted",
        WARM_UP,
        "return ComposedDpEvent([first(self.asks), then(answered - self.asks)])",
        "return then(answered - self.asks)",
        f"{WARM_UP_TESTS}::test_both_phases_are_in_the_plan",
    ),
    Mutant(
        "another-warm-up-has-the-same-coins",
        "fedgen/experiments/settings.py",
        'chosen.append(whole["warm_up"])',
        "pass",
        f"{WARM_UP_TESTS}::test_another_warm_up_is_another_run",
    ),
    Mutant(
        "central-images-divide-by-their-rows",
        "fedgen/methods/central_images.py",
        "return of_rows(small, clip, labels, facts.classes)",
        "return of_rows(small / max(1, len(labels)), clip, labels, facts.classes)",
        "tests/methods/test_central_images.py::test_no_division_by_private_counts",
    ),
    Mutant(
        "all-keys-are-announced",
        MASKING,
        "else _degree(len(keys), sums.threshold, sums.colluders)",
        "else min(_degree(sums.asked, sums.threshold, sums.colluders), len(keys) - 1)",
        f"{MASKING_TESTS}::test_however_few_announce_keys_colluders_are_below_the_threshold",
    ),
    Mutant(
        "other-keys-for-a-round-that-was-answered",
        CLIENT,
        "    if server_round <= max(home.answered, -1 if done is None else done):\n",
        "    if server_round < min(home.answered, 0 if done is None else done):\n",
        f"{SUM_TESTS}::test_a_client_that_answered_announces_no_other_keys_for_the_round",
    ),
    Mutant(
        "a-client-without-rows-trains",
        CRITICS,
        'round draws) descend; without rows, none."""\n        if not len(shard):',
        'round draws) descend; without rows, none."""\n        if len(shard) < 0:',
        f"{SUM_TESTS}::test_a_client_without_rows_learns_and_contributes_nothing",
    ),
    Mutant(
        "what-was-spent-before-a-gap-was-not-planned",
        "fedgen/federation/rounds.py",
        "for each in (spend, with_draws_seen(spend)))",
        "for each in (spend,))",
        f"{SUM_TESTS}::test_a_run_of_clients_coins_goes_on_after_a_client_did_not_answer",
    ),
    Mutant(
        "a-reply-that-is-there-twice-counts-twice",
        "fedgen/federation/messages.py",
        "once = {reply.metadata.reply_to_message_id: (client, reply) for client, reply in replies}",
        "once = dict(enumerate(replies))",
        f"{SUM_TESTS}::test_words_are_added_up_on_the_way",
    ),
    Mutant(
        "colluders-and-liars-are-one-and-the-same",
        ACCOUNTS,
        "min(one_more + len(lost), own_alone)",
        "one_more",
        f"{ACCOUNT_TESTS}::test_colluders_and_clients_without_a_bound_add_up",
    ),
    Mutant(
        "one-colluder-more-opens-no-smaller-sum-between-sites",
        ACCOUNTS,
        "(self.signed or sums.colluders >= sums.threshold // 2)",
        "(sums.colluders >= sums.threshold // 2)",
        f"{ACCOUNT_TESTS}::test_one_colluder_more_counts_as_all_where_clients_sign",
    ),
    Mutant(
        "masks-hold-however-many-collude",
        ACCOUNTS,
        "(self.signed or sums.colluders >= sums.threshold // 2)",
        "(self.signed or sums.colluders >= sums.threshold)",
        f"{ACCOUNT_TESTS}::test_colluders_and_clients_without_a_bound_add_up",
    ),
    Mutant(
        "canaries-of-other-neighbours",
        "fedgen/experiments/settings.py",
        "        plan = found.method.plan\n",
        "        plan = found.at_noise(None).plan\n",
        f"{SUM_TESTS}::test_canaries_of_a_run_are_its_neighbours",
    ),
    Mutant(
        "a-share-of-all-that-are-asked",
        RELEASES,
        "return std / math.sqrt(self.honest)",
        "return std / math.sqrt(self.asked)",
        f"{RELEASE_TESTS}::test_the_shares_that_are_counted_on_make_the_noise_that_is_promised",
    ),
    Mutant(
        "a-share-without-the-root",
        RELEASES,
        "return std / math.sqrt(self.honest)",
        "return std / self.honest",
        f"{RELEASE_TESTS}::test_the_shares_that_are_counted_on_make_the_noise_that_is_promised",
    ),
    Mutant(
        "colluders-forgotten",
        RELEASES,
        "return self.threshold - self.colluders",
        "return self.threshold",
        f"{RELEASE_TESTS}::test_the_shares_that_are_counted_on_make_the_noise_that_is_promised",
    ),
    Mutant(
        "colluders-forgotten-under-attack",
        RELEASES,
        "return std / math.sqrt(self.honest)",
        "return std / math.sqrt(4 * self.asked)",
        "tests/contracts/test_attacks.py"
        "::test_neighbours_are_as_far_apart_as_is_proven[secure-gs_wgan_small]",
    ),
    Mutant(
        "a-grid-too-coarse-for-the-lemma",
        RELEASES,
        "_SHARE_BITS = 6",
        "_SHARE_BITS = -1",
        f"{RELEASE_TESTS}::test_the_lemma_of_secure_sums",
    ),
    Mutant(
        "sign-lost-in-the-ring",
        RELEASES,
        'torch.from_numpy(words.view(f"i{self.bits // 8}").astype(np.float64))',
        "torch.from_numpy(words.astype(np.float64))",
        f"{RELEASE_TESTS}::test_n_clients_are_one_client",
    ),
    Mutant(
        "the-sign-of-zero-leaks",
        NOISE,
        "whole.add_(moved).add_(0.0)",
        "whole.add_(moved)",
        f"{NOISE_TESTS}::test_zero_has_one_encoding",
    ),
    Mutant(
        "bytes-depend-on-records",
        RELEASES,
        "    return whole.mul_(grid).to(torch.float32)",
        "    signs = exact.to(torch.float64)\n"
        "    return torch.copysign(whole.abs() * grid, torch.where("
        "whole == 0, signs, whole)).to(torch.float32)",
        "tests/contracts/test_bytes.py::test_neighbours_send_the_same_bytes[gs_wgan_small-own]",
    ),
    Mutant(
        "rounded-before-the-noise",
        RELEASES,
        'rounded_gaussian(exact.to(torch.float64) / grid, share / grid, coins, "share")',
        'rounded_gaussian((exact.double() / grid).round(), share / grid, coins, "share")',
        f"{RELEASE_TESTS}::test_rounding_comes_after_the_noise",
    ),
    Mutant(
        "a-sum-past-the-end-of-the-ring",
        RELEASES,
        "float(whole.abs().max()) >= self._most",
        "float(whole.abs().max()) >= 9 * self._most",
        f"{RELEASE_TESTS}::test_a_sum_wraps_around_and_comes_back",
    ),
    Mutant(
        "nothing-but-zero-where-a-coin-says-no",
        MECHANISMS,
        "            exact = clip_rows(raw, self.clip) / self.draw.rate\n"
        "        return self.aggregation.sent(exact, self.std,",
        "            exact = clip_rows(raw, self.clip) / self.draw.rate\n"
        "        std = self.std if exact.any() else 1e-9 * self.std\n"
        "        return self.aggregation.sent(exact, std,",
        f"{RELEASE_TESTS}::test_the_shares_that_are_counted_on_make_the_noise_that_is_promised",
    ),
    Mutant(
        "a-client-without-rows-contributes",
        CRITICS,
        "contributes=not removed)",
        "contributes=True)",
        f"{SUM_TESTS}::test_a_client_that_is_not_drawn_or_has_no_rows_adds_noise_alone",
    ),
    Mutant(
        "coins-of-clients-amplify-whoever-fails",
        "fedgen/privacy/batches.py",
        "        if self.hidden:\n            return PoissonSampledDpEvent(self.rate, gated)",
        "        if self.rate < 1:\n            return PoissonSampledDpEvent(self.rate, gated)",
        f"{SUM_TESTS}::test_coins_of_clients_amplify_against_the_server_unless_one_fails",
    ),
    Mutant(
        "noise-of-a-sum-adds-up-again",
        ANSWERING,
        "of_sums = federated and local and facts",
        "of_sums = federated and facts",
        f"{SUM_TESTS}::test_the_event_is_that_of_the_sum_and_nothing_adds_up_twice",
    ),
    Mutant(
        "one-cohort-shares-anothers-coins",
        "fedgen/federation/messages.py",
        "*([str(cohort).encode()] if cohort else [])",
        "*([str(cohort).encode()] if cohort == 1 else [])",
        f"{SUM_TESTS}::test_another_cohort_finds_other_coins",
    ),
    Mutant(
        "a-lost-sum-is-counted-on",
        "fedgen/federation/sums.py",
        "if not answer.arrays and c not in parts]",
        "if not answer.arrays and c in parts]",
        f"{SUM_TESTS}::test_a_sum_that_is_lost_takes_its_terms_along",
    ),
    Mutant(
        "one-question-over-two-cohorts",
        TRAINING,
        "if self.run_dir.opened(asked, of) != of:",
        "if self.run_dir.opened(asked, of) is None:",
        f"{SUM_TESTS}::test_a_seeded_run_does_not_add_up_one_question_over_two_cohorts",
    ),
    Mutant(
        "fewer-answers-than-the-noise-counts-on",
        "fedgen/experiments/settings.py",
        "    if answers < aggregation.threshold:",
        "    if answers < 1:",
        f"{SUM_TESTS}::test_mistakes_are_said_before_anything_runs",
    ),
    Mutant(
        "noise-of-liars-is-relied-on",
        ACCOUNTS,
        "if not lost or not isinstance(sums, Secure):",
        "if not lost or isinstance(sums, Secure):",
        f"{ACCOUNT_TESTS}::test_noise_of_clients_without_a_bound_is_not_relied_on",
    ),
    Mutant(
        "more-colluders-cost-nothing",
        ACCOUNTS,
        "math.sqrt((sums.honest - fewer) / sums.honest)",
        "math.sqrt(sums.honest / sums.honest)",
        f"{ACCOUNT_TESTS}::test_what_more_colluders_learn_is_printed",
    ),
    Mutant(
        "a-share-leaves-without-masks",
        CLIENT,
        "    if home.terms.masks:\n        words",
        "    if not home.terms.masks:\n        words",
        "tests/federation/test_equivalence.py::test_sums_under_masks_are_equal_to_the_bit",
    ),
    Mutant(
        "no-mask-of-its-own",
        MASKING,
        "masked = words + stream(self._seed, len(words), words.dtype)",
        "masked = words.copy()",
        f"{MASKING_TESTS}::test_masked_words_and_what_pairs_of_keys_leave_are_uniform",
    ),
    Mutant(
        "masks-that-do-not-cancel",
        MASKING,
        "(np.add if self.me < other else np.subtract)(masked",
        "(np.add if self.me != other else np.subtract)(masked",
        f"{MASKING_TESTS}::test_the_sum_of_those_who_answered_or_nothing",
    ),
    Mutant(
        "masks-of-silent-clients-stay",
        MASKING,
        "found = found - mask if other < client else found + mask",
        "found = found + mask if other < client else found - mask",
        f"{MASKING_TESTS}::test_a_hundred_clients_drop_out_at_each_stage[0.1]",
    ),
    Mutant(
        "one-mask-for-two-rounds",
        MASKING,
        'b"mask" + _names(*sorted((one, other))) + context',
        'b"mask" + _names(*sorted((one, other)))',
        f"{MASKING_TESTS}::test_masks_are_those_of_aes",
    ),
    Mutant(
        "both-secrets-of-one-client",
        MASKING,
        "if heard & unheard or self.me not in heard:",
        "if self.me not in heard:",
        f"{MASKING_TESTS}::test_what_the_protocol_does_not_allow_is_refused",
    ),
    Mutant(
        "shares-told-twice",
        MASKING,
        "        if self._told:",
        "        if self._told is None:",
        f"{MASKING_TESTS}::test_what_the_protocol_does_not_allow_is_refused",
    ),
    Mutant(
        "two-vectors-under-one-mask",
        MASKING,
        "and bool(self._held) and not self._used",
        "and bool(self._held)",
        f"{MASKING_TESTS}::test_what_the_protocol_does_not_allow_is_refused",
    ),
    Mutant(
        "less-noise-than-was-counted",
        MASKING,
        "if len(heard) < self.sums.threshold or not",
        "if not",
        f"{MASKING_TESTS}::test_what_the_protocol_does_not_allow_is_refused",
    ),
    Mutant(
        "fewer-shares-than-the-threshold",
        MASKING,
        "    if len(shares) < threshold:\n",
        "    if len(shares) < 1:\n",
        f"{MASKING_TESTS}::test_shares_below_the_threshold_tell_nothing",
    ),
    Mutant(
        "masks-without-their-clients-names",
        MASKING,
        'b"mask" + _names(*sorted((one, other))) + context',
        'b"mask" + context',
        f"{MASKING_TESTS}::test_a_variant_of_another_key_shares_no_mask_with_it",
    ),
    Mutant(
        "a-server-passes-shares-on-to-some",
        MASKING,
        "        shamir = (len(keys) + sums.colluders) // 2 + 1\n",
        "        pass\n",
        f"{SIGNING_TESTS}::test_no_two_disjoint_sets_of_honest_clients_give_a_secret_back",
    ),
    Mutant(
        "lists-are-signed-before-an-answer",
        CLIENT,
        "masker.check_lists(*map(set, lists))",
        "assert lists",
        f"{SIGNING_TESTS}::test_lists_are_signed_by_those_who_answered_alone",
    ),
    Mutant(
        "two-liars-evict-one",
        "fedgen/federation/sums.py",
        "if count >= certain}",
        "if count >= 2}",
        f"{SUM_TESTS}::test_two_liars_do_not_have_an_honest_client_blamed_alone",
    ),
    Mutant(
        "masked-sums-are-of-one-client",
        "fedgen/federation/sums.py",
        "        of=tuple(sorted(answers)),\n",
        "",
        f"{SUM_TESTS}::test_under_masks_a_sum_is_of_all_who_answered",
    ),
    Mutant(
        "wrong-shares-are-taken",
        MASKING,
        "return _commitment(secret, context) == text[64:]",
        "return len(secret) == 32",
        f"{MASKING_TESTS}::test_wrong_shares_are_left_out_or_the_sum_is_void",
    ),
    Mutant(
        "words-are-masked-despite-a-broken-seal",
        MASKING,
        "            self._held.clear()",
        "            self._held.copy()",
        f"{MASKING_TESTS}::test_what_the_protocol_does_not_allow_is_refused",
    ),
    Mutant(
        "charged-before-the-shares-are-opened",
        CLIENT,
        "if not masker.is_ready:",
        "if masker is None:",
        "tests/deployment/test_site.py::test_no_answer_before_the_shares_are_opened",
    ),
    Mutant(
        "shares-that-are-the-secret",
        MASKING,
        "for _ in range(threshold - 1)]",
        "for _ in range(0)]",
        f"{MASKING_TESTS}::test_shares_below_the_threshold_tell_nothing",
    ),
    Mutant(
        "one-client-twice",
        MASKING,
        "if len(set(flat)) < len(flat) or any(",
        "if any(",
        f"{MASKING_TESTS}::test_what_the_protocol_does_not_allow_is_refused",
    ),
    Mutant(
        "masks-from-32-bits",
        MASKING,
        "Cipher(AES256(key), CTR(bytes(16)))",
        "Cipher(AES256(key[:4] * 8), CTR(key[:8] * 2))",
        f"{MASKING_TESTS}::test_masks_are_those_of_aes",
    ),
    Mutant(
        "a-ring-that-falls-apart",
        MASKING,
        "if run < _RARE and caught < _RARE:",
        "if caught < _RARE:",
        f"{MASKING_TESTS}::test_the_degree_keeps_a_ring_whole_and_its_neighbourhoods_honest",
    ),
    Mutant(
        "noise-adds-up-without-its-root",
        ROUTING,
        "math.sqrt(self.answers_per_row) * noise_multiplier, hidden",
        "self.answers_per_row * noise_multiplier, hidden",
        f"{ROUTING_TESTS}::test_the_sum_of_two_answers_is_dominated_and_met",
    ),
    Mutant(
        "noise-adds-up-without-its-root-under-attack",
        ROUTING,
        "math.sqrt(self.answers_per_row) * noise_multiplier, hidden",
        "10 * self.answers_per_row * noise_multiplier, hidden",
        "tests/contracts/test_attacks.py::test_an_attack_on_sums_finds_noise_counted_twice",
    ),
    Mutant(
        "drawn-again-until-all-are-alive",
        TRAINING,
        "ready = replace(ready, coins=ready.coins.drawing_by(key))",
        "pass",
        f"{INCIDENTS}::test_a_client_that_is_silent_is_asked_again_and_again",
    ),
    Mutant(
        "rows-in-an-exception-are-printed",
        TRAINING,
        'told=self.ready.privacy.noise == "seeded"',
        "told=True",
        "tests/federation/test_faults.py::test_what_an_exception_says_may_be_a_row",
    ),
    Mutant(
        "a-lost-key-of-draws-goes-unnoticed",
        TRAINING,
        "if made and run_dir.begun():",
        "if False:",
        f"{INCIDENTS}::test_without_the_key_of_its_draws_nothing_amplifies",
    ),
    Mutant(
        "what-was-really-answered-is-not-looked-at",
        "fedgen/experiments/accounts.py",
        "if found is None or not self.unanswered() or not self.method.cohort.drawn:",
        "if True:",
        "tests/experiments/test_accounts.py"
        "::test_a_client_that_does_not_answer_leaves_what_was_really_answered",
    ),
    Mutant(
        "rounds-done-again-are-drawn-once-more",
        ROUTING,
        "more = binom.sf(upto // times, draws, rate)  # by the draws of this step alone",
        "times, more = 1, binom.sf(upto, draws, rate)",
        f"{ROUTING_TESTS}::test_steps_that_are_done_again_count_by_the_same_draw",
    ),
    Mutant(
        "noise-with-holes-in-its-tails",
        NOISE,
        "(noisy.sub_(moved).abs_() >= 0.5 - _ERROR) | (magnitude < _LEAST)",
        "noisy.sub_(moved).abs_() >= 0.5 - _ERROR",
        f"{NOISE_TESTS}::test_the_tails_have_their_probability",
    ),
    Mutant(
        "noise-rounded-by-floating-point",
        NOISE,
        "(noisy.sub_(moved).abs_() >= 0.5 - _ERROR) | (magnitude < _LEAST)",
        "magnitude < _LEAST",
        f"{NOISE_TESTS}::test_the_tails_have_their_probability",
    ),
    Mutant(
        "noise-multiplied-in-single-precision",
        NOISE,
        "noisy = noisy.mul_(std).add_(rest)",
        "noisy = noisy.mul_(float(torch.tensor(std))).add_(rest)",
        f"{NOISE_TESTS}::test_floating_point_comes_to_what_all_digits_come_to",
    ),
    Mutant(
        "what-cancels-is-not-looked-at",
        LAYERS,
        "return squares_of(self.gradients) + _cancelling(self.lengths)",
        "return squares_of(self.gradients)",
        f"{PER_EXAMPLE_TESTS}::test_what_cancels_counts_as_a_part_of_its_products",
    ),
    Mutant(
        "who-was-not-asked-yet-has-a-bound",
        ACCOUNTS,
        "some = len(found) < len(spends) and NonPrivateDpEvent() not in self.planned(1)",
        "some = len(found) < len(spends)",
        "tests/contracts/test_methods.py"
        "::test_without_privacy_there_is_none_while_clients_were_not_asked",
    ),
    Mutant(
        "pieces-are-clipped-as-examples",
        PER_EXAMPLE,
        "if not len(given[0]) == len(out) == count:",
        "if False:",
        f"{PER_EXAMPLE_TESTS}::test_examples_that_are_not_apart_are_refused",
    ),
    Mutant(
        "examples-are-not-tried-apart",
        PER_EXAMPLE,
        "if not torch.allclose(together, alone[:count], rtol=1e-2, atol=1e-4, equal_nan=True):",
        "if False:",
        f"{PER_EXAMPLE_TESTS}::test_examples_that_are_not_apart_are_refused",
    ),
    Mutant(
        "positions-that-cancel-are-not-looked-at",
        LAYERS,
        "return found + _cancelling((from_x * from_y).sqrt())",
        "return found",
        f"{PER_EXAMPLE_TESTS}::test_what_cancels_counts_as_a_part_of_its_products",
    ),
    Mutant(
        "products-in-single-precision",
        PER_EXAMPLE,
        'multiplied = _double if precision == "float64" else _single',
        "multiplied = _single",
        f"{PER_EXAMPLE_TESTS}::test_positions_that_cancel_move_a_sum_by_at_most_the_clip",
    ),
    Mutant(
        "sums-in-single-precision",
        PER_EXAMPLE,
        "torch.zeros_like(value, dtype=torch.float64) for name",
        "torch.zeros_like(value) for name",
        f"{PER_EXAMPLE_TESTS}"
        "::test_one_row_more_among_sixty_thousand_moves_a_sum_by_at_most_the_clip",
    ),
    Mutant(
        "parts-of-a-batch-by-place",
        MECHANISMS,
        "return [batch[part == each] for each in range(number)]",
        "return list(np.array_split(batch, number))",
        f"{TESTS}::test_a_row_more_changes_its_own_part_alone",
    ),
    Mutant(
        "draws-that-are-seen-cost-less",
        "fedgen/privacy/accounting.py",
        "return revealed_epsilon(_rate(event), _gaussian(event).noise_multiplier, count, delta)",
        "return revealed_epsilon(\n"
        "        _rate(event) / 2, _gaussian(event).noise_multiplier, count, delta\n    )",
        "tests/privacy/test_accounting.py::test_draws_cost_no_more_than_if_they_were_seen",
    ),
    Mutant(
        "noise-that-may-be-missing-adds-up",
        ANSWERING,
        "and facts.all_answer and draw.count_is_fixed",
        "and draw.count_is_fixed",
        f"{GS_WGAN_TESTS}::test_noise_that_may_be_missing_does_not_add_up",
    ),
    Mutant(
        "single-answers-are-rounded-before-their-sum",
        "fedgen/strategies/sample_gradients.py",
        'torch.from_numpy(answers[client].arrays["answer"]).double()',
        'torch.from_numpy(answers[client].arrays["answer"]).half().double()',
        f"{GS_WGAN_TESTS}::test_the_generator_follows_the_sum_alone",
    ),
    Mutant(
        "any-noise-will-do",
        "fedgen/federation/rounds.py",
        'raise _UnusableError("unplanned")',
        "pass",
        "tests/federation/test_faults.py::test_answers_of_other_noise_end_the_run",
    ),
    Mutant(
        "one-noise-for-what-two-versions-solve-for",
        "fedgen/experiments/settings.py",
        "chosen.append(in_short(noise_multiplier))",
        "pass",
        "tests/experiments/test_branches.py::test_another_noise_is_another_run",
    ),
    Mutant(
        "one-noise-for-two-numbers-of-labels",
        "fedgen/experiments/settings.py",
        "chosen.append(held.classes)",
        "pass",
        "tests/experiments/test_branches.py::test_another_number_of_labels_is_another_run",
    ),
    Mutant(
        "a-phase-at-the-others-cost",
        WARM_UP,
        "round=each.round + begins, plan=plan)",
        "round=each.round + begins)",
        "tests/contracts/test_attacks.py::test_both_phases_of_a_warm_start_are_attacked"
        "[psg_small-release]",
    ),
    Mutant(
        "clients-share-their-noise",
        CLIENT,
        'self._coins.at("client", client),',
        "self._coins,",
        f"{GS_WGAN_TESTS}::test_the_clients_noise_is_their_own",
    ),
    Mutant(
        "no-grid",
        RELEASES,
        "    grid = grid_of(std, _GRID_BITS)\n"
        "    whole = rounded_gaussian(exact.to(torch.float64) / grid, std / grid, coins, "
        '"release")\n'
        "    return whole.mul_(grid).to(torch.float32)",
        "    whole = torch.from_numpy(coins.secret_uniforms(exact.numel(), "
        '"release")).view(exact.shape)\n'
        "    return (exact + std * torch.special.ndtri(whole)).to(torch.float32)",
        f"{TESTS}::test_what_is_released_lies_on_a_grid_of_the_noise",
    ),
    Mutant(
        "noise-by-round-alone",
        CLIENT,
        "coins = home.coins.of_release(asked)",
        "coins = home.coins",
        f"{CLIENT_TESTS}::test_a_run_done_again_shares_noise_with_the_first_for_the_same_questions"
        "_alone",
    ),
    Mutant(
        "noise-at-two-scales",
        "fedgen/experiments/settings.py",
        "branch_of(config, held, shards, found.noise)",
        '""',
        "tests/experiments/test_branches.py::test_no_two_scales_of_one_noise",
    ),
    Mutant(
        "clip-left-out-of-rows",
        BOUNDS,
        "rows if math.isinf(self.clip) else clip_rows(rows, self.clip)",
        "rows",
        f"{TESTS}::test_sensitivity_bounds_any_exchange",
    ),
    Mutant(
        "clip-left-out-of-a-sum",
        PER_EXAMPLE,
        "scale = (clip * below / norms).clamp(max=1.0)",
        "scale = torch.ones_like(norms)",
        f"{TESTS}::test_a_sum_moves_by_at_most_its_sensitivity",
    ),
    Mutant(
        "group-clip",
        PER_EXAMPLE,
        "norms = norms_of(rows)\n    blocks",
        "norms = norms_of(rows.sum(0)[None]).expand(len(rows))\n    blocks",
        f"{TESTS}::test_a_sum_moves_by_at_most_its_sensitivity",
    ),
    Mutant(
        "mean-clip",
        PER_EXAMPLE,
        "norms = norms_of(rows)\n    blocks",
        "norms = norms_of(rows.mean(0)[None]).expand(len(rows))\n    blocks",
        f"{TESTS}::test_a_sum_moves_by_at_most_its_sensitivity",
    ),
    Mutant(
        "layers-clipped-one-by-one-counted-as-one",
        PER_EXAMPLE,
        "norms.append(squares.sum(0).sqrt())",
        "norms.append(squares.amax(0).sqrt())",
        f"{PER_EXAMPLE_TESTS}::test_one_example_more_moves_the_sum_by_at_most_the_clip",
    ),
    Mutant(
        "norms-of-long-rows-in-single-precision",
        LAYERS,
        "dim=1, dtype=torch.float64)",
        "dim=1).double()",
        f"{TESTS}::test_long_rows_are_in_the_ball_too",
    ),
    Mutant(
        "rows-of-a-matrix-clipped-one-by-one",
        MECHANISMS,
        'clip_rows(matrix.detach().to("cpu", torch.float32)[None], self.clip)[0]',
        'clip_rows(matrix.detach().to("cpu", torch.float32), self.clip)',
        f"{TESTS}::test_a_matrix_is_clipped_as_a_whole",
    ),
    Mutant(
        "bad-rows-kept",
        PER_EXAMPLE,
        "return torch.where(norms < _LONGEST, scale, 0.0)",
        "return scale",
        f"{TESTS}::test_a_bad_row_becomes_zero_and_its_neighbours_stay",
    ),
    Mutant(
        "noise-halved-in-rows",
        MECHANISMS,
        "return self.aggregation.sent(exact, self.std, self.event(shape[0]), self.unit, coins)",
        "return self.aggregation.sent(exact, self.std / 2, self.event(shape[0]), self.unit, coins)",
        f"{TESTS}::test_noise_has_the_promised_standard_deviation",
    ),
    Mutant(
        "noise-halved-in-rows-under-attack",
        MECHANISMS,
        "return self.aggregation.sent(exact, self.std, self.event(shape[0]), self.unit, coins)",
        "return self.aggregation.sent(exact, self.std / 2, self.event(shape[0]), self.unit, coins)",
        "tests/contracts/test_attacks.py"
        "::test_neighbours_are_as_far_apart_as_is_proven[own-gs_wgan_small]",
    ),
    Mutant(
        "noise-over-the-root-of-the-batch",
        MECHANISMS,
        "exact = self._exact(math.prod(shape), sums).view(1, *shape)\n"
        "        return self.aggregation.sent(exact, self.std, self",
        "exact = self._exact(math.prod(shape), sums).view(1, *shape)\n"
        "        std = self.std / math.sqrt(self.divisor)\n"
        "        return self.aggregation.sent(exact, std, self",
        f"{TESTS}::test_each_mechanism_noises_as_promised",
    ),
    Mutant(
        "sensitivity-of-a-row-taken-for-c",
        MECHANISMS,
        "self.bound.radius if whole else self.bound.diameter",
        "self.bound.radius",
        f"{TESTS}::test_the_bound_is_met",
    ),
    Mutant(
        "division-by-a-realized-count",
        MECHANISMS,
        "return total.div_(self.divisor)",
        "return total.div_(max(1, int(total.count_nonzero())))",
        f"{TESTS}::test_a_sum_moves_by_at_most_its_sensitivity",
    ),
    Mutant(
        "noise-that-repeats",
        RELEASES,
        'rounded_gaussian(exact.to(torch.float64) / grid, std / grid, coins, "release")',
        'rounded_gaussian(exact.to(torch.float64) / grid, std / grid, Coins.of(0, "seeded"))',
        f"{TESTS}::test_releases_at_different_places_have_independent_noise",
    ),
    Mutant(
        "a-descent-counted-as-one-step",
        MECHANISMS,
        "repeat(mechanism.event(), len(steps))",
        "mechanism.event()",
        "tests/methods/test_dpgan.py::test_steps_are_charged_one_by_one_and_share_no_noise",
    ),
    Mutant(
        "noise-and-batch-the-same-in-all-steps-of-a-message",
        "fedgen/adversarial.py",
        'coins.at("steps", round_, "step", number)',
        'coins.at("steps", round_)',
        "tests/methods/test_dpgan.py::test_one_client_is_algorithm_1_bit_for_bit",
    ),
    Mutant(
        "overlapping-questions-share-noise",
        "fedgen/adversarial.py",
        'coins.at("steps", round_, "step", number)',
        'coins.at("steps", round_ + number)',
        "tests/methods/test_dpgan.py::test_steps_are_charged_one_by_one_and_share_no_noise",
    ),
    Mutant(
        "patches-that-overlap-counted-once",
        LAYERS,
        "block = [(i, j) for i in range(kernel[0] // down) for j in range(kernel[1] // right)]",
        "block = [(kernel[0] // down - 1, kernel[1] // right - 1)]",
        f"{PER_EXAMPLE_TESTS}::test_patches_that_are_never_made",
    ),
    Mutant(
        "batch-counted-outside-the-draw",
        ROUTING,
        "gate = GaussianDpEvent(noise_multiplier / math.sqrt(rows / draws))",
        "gate, draws = GaussianDpEvent(noise_multiplier), rows",
        f"{ROUTING_TESTS}::test_one_draw_is_one_node",
    ),
    Mutant(
        "batches-drawn-at-another-rate-than-counted",
        "fedgen/privacy/batches.py",
        'coins.secret_bits(rows, "batch") < np.uint64(int(self.rate * 2**64))',
        'coins.secret_bits(rows, "batch") < np.uint64(int(1.5 * self.rate * 2**64))',
        f"{TESTS}::test_poisson_batches_have_the_promised_rate_and_no_memory",
    ),
    Mutant(
        "rounding-of-composition-ignored",
        "fedgen/privacy/accounting.py",
        "rounding = 2 * float(np.finfo(float).eps) * (releases + cells)",
        "rounding = 0.0",
        "tests/privacy/test_accounting.py::test_small_deltas_do_not_drown_in_rounding",
    ),
    Mutant(
        "rare-numbers-of-visits-forgotten",
        "fedgen/privacy/accounting.py",
        "gaussian_delta(mus, eps)) + beyond",
        "gaussian_delta(mus, eps))",
        "tests/privacy/test_accounting.py::test_revealed_draws_count_all_visits",
    ),
    Mutant(
        "batches-known-from-the-seed-in-secure-mode",
        "fedgen/coins.py",
        "return _words(self.secret_key, self._hidden(where), count)",
        "return _words(self.public_key, self._hidden(where), count)",
        "tests/test_coins.py",
    ),
    Mutant(
        "audit-judged-by-what-it-was-chosen-by",
        "fedgen/privacy/audit.py",
        "return _rates(first[half:], second[half:], best, confidence)",
        "return _rates(first[:half], second[:half], best, confidence)",
        "tests/privacy/test_audit.py::test_a_threshold_is_judged_by_scores_that_did_not_choose_it",
    ),
    Mutant(
        "poisson-accountant-for-draws-of-critics",
        "fedgen/privacy/accounting.py",
        "poisson = isinstance(event, PoissonSampledDpEvent) and "
        "relation is Relation.ADD_OR_REMOVE_ONE",
        "poisson = not isinstance(event, GaussianDpEvent)",
        "tests/privacy/test_accounting.py::test_per_sample_routing_as_published_settings",
    ),
    Mutant(
        "amplified-though-critics-train-when-drawn",
        ANSWERING,
        "hidden = not on_query and (facts.draws_are_hidden or not federated)",
        "hidden = facts.draws_are_hidden or not federated",
        f"{GS_WGAN_TESTS}::test_the_published_variant_is_not_amplified_with_clients_either",
    ),
    Mutant(
        "budget-checked-after-the-spend",
        CLIENT,
        "home.ledger.rows + query.count > home.terms.rows",
        "home.ledger.rows > home.terms.rows",
        f"{CLIENT_TESTS}::test_the_client_enforces_its_budget",
    ),
    Mutant(
        "no-limit-to-a-kind-of-release",
        CLIENT,
        "if not repeat and home.terms.limits is not None:",
        "if home.terms.limits is None:",
        f"{CLIENT_TESTS}::test_no_kind_of_release_is_charged_more_often_than_planned",
    ),
    Mutant(
        "embedding-of-codes-not-counted",
        SEQUENCE,
        "return events[0] if len(events) == 1 else ComposedDpEvent(events)",
        "return events[0]",
        "tests/methods/test_dp_merf_ae.py::test_both_kinds_of_rounds_are_paid_for",
    ),
    Mutant(
        "classifier-tells-of-the-draw",
        "fedgen/methods/dp_gan_dpac.py",
        'generator=coins.public("labels"))',
        "generator=torch.Generator().manual_seed(\n"
        '                coins.secret("routing").getrandbits(60)))',
        "tests/methods/test_dp_gan_dpac.py::test_classifiers_do_not_see_the_draw",
    ),
    Mutant(
        "critics-share-a-subset",
        CRITICS,
        "real = partial(self.rows, subsets, shard)",
        "real = partial(self.rows, self.subsets(range(len(members)), shard, coins), shard)",
        f"{GS_WGAN_TESTS}::test_replacing_a_row_changes_one_critic",
    ),
    Mutant(
        "budget-of-the-server-checked-after-the-spend",
        "fedgen/federation/rounds.py",
        "self.state.rows[c] + len(rows) > budget.rows]",
        "self.state.rows[c] > budget.rows]",
        "tests/contracts/test_methods.py::test_a_client_drawn_often_ends_the_run_before_it_overspends",
    ),
    Mutant(
        "embedding-asked-again-after-a-kill",
        TRAINING,
        "            due |= state.rounds == once\n",
        "",
        f"{DP_MERF_TESTS}::test_a_run_for_release_that_is_killed_later_asks_no_second_time",
    ),
    Mutant(
        "a-step-of-a-short-sequence-asked-again-after-a-kill",
        TRAINING,
        "            due |= state.rounds < once and self.method.plan.short and secret\n",
        "",
        "tests/methods/test_dp_merf_ae.py::test_a_step_that_was_paid_for_is_not_done_again",
    ),
    Mutant(
        "what-clients-send-whole-is-not-clipped-again",
        SEQUENCE,
        "meeting = self.facts.aggregation(self.facts.clients, most)",
        "meeting = self.facts.aggregation(self.facts.clients)",
        f"{SUM_TESTS}::test_an_embedding_of_a_client_is_in_the_ball_whatever_rows_it_has",
    ),
    Mutant(
        "repeats-of-a-sum-are-charged-once",
        SEQUENCE,
        "max(0, min(each.repeats, answered - start))",
        "max(0, min(1, answered - start))",
        f"{MIXTURE_TESTS}::test_all_sums_together_cost_one_gaussian",
    ),
    Mutant(
        "repeats-of-a-sum-share-one-noise",
        SEQUENCE,
        "(repeats / share) ** 0.5",
        "(1 / share) ** 0.5",
        f"{MIXTURE_TESTS}::test_all_sums_together_cost_one_gaussian",
    ),
    Mutant(
        "moments-weigh-entries-off-the-diagonal-twice",
        PER_EXAMPLE,
        "weight = torch.where(down == right, 1.0, math.sqrt(2)).double()",
        "weight = torch.where(down == right, 1.0, 2.0).double()",
        f"{MIXTURE_TESTS}::test_a_row_moves_every_sum_by_at_most_its_clip",
    ),
    Mutant(
        "moments-beside-are-not-clipped-with-the-others",
        PER_EXAMPLE,
        "norms = lengths * (lengths.square() + norms_of(other).square()).sqrt()",
        "norms = lengths.square()",
        f"{MIXTURE_TESTS}::test_moments_are_those_of_the_rows",
    ),
    Mutant(
        "shares-are-not-of-the-whole-budget",
        MIXTURE,
        "sums.mechanism(left * shares[name], repeats[name]",
        "sums.mechanism(shares[name], repeats[name]",
        f"{MIXTURE_TESTS}::test_all_sums_together_cost_one_gaussian",
    ),
    Mutant(
        "noise-is-taken-for-spread",
        MIXTURE,
        "(noise / counts[label]).square() * both",
        "0 * both",
        f"{MIXTURE_TESTS}::test_noise_is_shrunk_away_where_it_is_all_there_is",
    ),
    Mutant(
        "embeddings-share-their-noise",
        SEQUENCE,
        "here, private = coins.at(asked.name, round_), shard.on(self.device)",
        "here, private = coins, shard.on(self.device)",
        f"{DP_MERF_TESTS}::test_noise_has_the_promised_scale_and_is_another_in_each_round",
    ),
    Mutant(
        "gradients-of-images-share-their-noise",
        "fedgen/methods/dp_sinkhorn.py",
        'coins.at("gradient", round_)',
        "coins",
        "tests/methods/test_dp_sinkhorn.py"
        "::test_images_clipped_by_themselves_take_more_noise[joint-1.0]",
    ),
    Mutant(
        "embeddings-by-features-of-any-length",
        PER_EXAMPLE,
        "scaled = scaled_by(rows, clipping_factors(norms, clip)).double()",
        "scaled = rows.double()",
        f"{PER_EXAMPLE_TESTS}::test_rows_that_are_no_gradients",
    ),
    Mutant(
        "what-a-start-cost-is-forgotten-later",
        "fedgen/experiments/accounts.py",
        "            if self.method.plan.before is not None:\n                spends",
        "            if False:\n                spends",
        "tests/experiments/test_start.py"
        "::test_no_method_has_an_epsilon_after_weights_without_one[dp_merf_small]",
    ),
    Mutant(
        "weights-of-another-run-count-nothing",
        "fedgen/experiments/settings.py",
        "    if config.start is None:\n        return method",
        "    if True:\n        return method",
        "tests/experiments/test_start.py"
        "::test_a_run_begins_with_the_weights_of_another_and_has_no_epsilon",
    ),
    Mutant(
        "aggregator-believes-what-arrives",
        RELEASES,
        "answers = [clip_rows(torch.from_numpy(each), self.clip).numpy() for each in answers]",
        "answers = list(answers)",
        f"{TESTS}::test_an_aggregator_clips_what_arrives",
    ),
    Mutant(
        "a-held-answer-to-any-question",
        "fedgen/federation/client_store.py",
        "return answer if question == asked else None",
        "return answer",
        "tests/federation/test_client_app.py"
        "::test_what_was_charged_is_sent_again_by_a_client_that_died",
    ),
    Mutant(
        "a-held-answer-is-never-charged",
        "fedgen/federation/client_app.py",
        "charged = answer is not None and home.ledger.last == asked",
        "charged = answer is not None",
        "tests/federation/test_client_app.py"
        "::test_what_was_held_and_not_charged_is_charged_when_it_leaves",
    ),
    Mutant(
        "noise-halved-in-an-aggregate",
        RELEASES,
        "return noised(_added(answers), std, coins.salted(told)).double()",
        "return noised(_added(answers), std / 2, coins.salted(told)).double()",
        f"{TESTS}::test_each_mechanism_noises_as_promised",
    ),
    Mutant(
        "mean-over-those-who-came",
        "fedgen/strategies/cohort.py",
        "            over = self.cohort.answers_per_row\n",
        "            over = max(1, len(answers))\n",
        f"{FEDAVG_TESTS}::test_an_empty_cohort_and_a_missing_client_do_not_show",
    ),
    Mutant(
        "clipped-leaves-whoever-is-trusted",
        "fedgen/federation/messages.py",
        "if not isinstance(sent, aggregation.leaves):",
        "if isinstance(sent, Answer):",
        "tests/federation/test_messages.py::test_what_an_aggregation_takes_leaves_for_it_alone",
    ),
    Mutant(
        "cohort-drawn-once-for-all",
        "fedgen/strategies/cohort.py",
        'self._coins.secret("cohort", server_round)',
        'self._coins.secret("cohort")',
        f"{FEDAVG_TESTS}::test_a_cohort_is_drawn_as_it_is_counted",
    ),
    Mutant(
        "ledger-charged-after-the-reply",
        CLIENT,
        "    if not charged:  # before anything leaves\n"
        "        home.ledger.charge(server_round, asked, query.count, answer.event)\n"
        "    home.store.commit(home.number, messages.ASK, server_round, {}, answer)\n",
        "    home.store.commit(home.number, messages.ASK, server_round, {}, answer)\n"
        "    home.ledger.charge(server_round, asked, query.count, answer.event)\n",
        f"{CLIENT_TESTS}::test_a_charge_comes_before_the_reply",
    ),
    Mutant(
        "spend-dropped-at-resume",
        "fedgen/privacy/ledger.py",
        "                self._note(int(entry",
        "                entry or self._note(int(entry",
        "tests/privacy/test_ledger.py::test_a_charge_is_on_disk_at_once",
    ),
    Mutant(
        "routing-shares-the-coins-of-training",
        CRITICS,
        'flips = torch.rand(index.shape, generator=coins.public("rows"))',
        "flips = torch.rand(index.shape, generator=torch.Generator().manual_seed(\n"
        '            coins.secret("routing").getrandbits(60)))',
        f"{GS_WGAN_TESTS}::test_training_by_rotation_does_not_see_the_draw",
    ),
    Mutant(
        "a-file-names-what-is-called",
        "fedgen/factories.py",
        "        if may_call(name, place):",
        "        if True:",
        f"{FOREIGN_FILES}::test_a_runs_settings_call_nothing_that_is_not_fedgens",
    ),
    Mutant(
        "a-name-stands-in-any-group",
        "fedgen/factories.py",
        "known = _by_group().get(group, frozenset())",
        "known = own()",
        f"{FOREIGN_FILES}::test_nor_what_is_fedgens_where_it_does_not_belong",
    ),
    Mutant(
        "a-name-stands-anywhere-in-its-group",
        "fedgen/factories.py",
        " if len(inside) == 1 or group in _OF_PARTS else ()",
        "",
        f"{FOREIGN_FILES}::test_nor_what_is_fedgens_where_it_does_not_belong",
    ),
    Mutant(
        "a-directory-names-its-cluster",
        "fedgen/experiments/identity.py",
        'if (address := config.runtime.get("address")) is not None:',
        "if address := None:",
        f"{FOREIGN_FILES}::test_a_directory_does_not_say_whose_machines_see_rows",
    ),
    Mutant(
        "a-matrix-says-where-rows-go",
        "fedgen/experiments/matrix.py",
        "        if OmegaConf.select(point.config, key):",
        "        if False:",
        f"{FOREIGN_FILES}::test_a_matrix_does_not_say_where_rows_or_figures_go",
    ),
    Mutant(
        "a-longer-run-counts-as-it-was-entered",
        "fedgen/privacy/spent.py",
        "anew = anew or over or entry.most != known",
        "anew = anew or over or known is None",
        f"{SPENT}::test_a_run_that_may_spend_more_than_it_was_to_is_checked_again",
    ),
    Mutant(
        "a-run-that-was-over-goes-on-unchecked",
        "fedgen/privacy/spent.py",
        "anew = anew or over or entry.most != known",
        "anew = anew or entry.most != known and not over",
        f"{SPENT}::test_a_run_that_may_spend_more_than_it_was_to_is_checked_again",
    ),
    Mutant(
        "settings-are-looked-up-once-more",
        "fedgen/factories.py",
        """        if isinstance(value, str) and "${" in value:""",
        "        if False:",
        f"{FOREIGN_FILES}::test_settings_are_not_resolved_once_more",
    ),
    Mutant(
        "a-file-looks-settings-up",
        "fedgen/files.py",
        """            if isinstance(event, yaml.ScalarEvent) and "${" in event.value:""",
        "            if False:",
        f"{FOREIGN_FILES}::test_yaml_has_nothing_that_is_looked_up",
    ),
    Mutant(
        "yaml-is-looked-at-by-another-parser",
        "fedgen/files.py",
        "events = yaml.parse(text, Loader=yaml.SafeLoader)",
        "events = yaml.parse(text, Loader=yaml.CSafeLoader)",
        f"{FOREIGN_FILES}::test_yaml_is_read_as_it_was_looked_at",
    ),
    Mutant(
        "a-directory-names-its-link",
        "fedgen/experiments/identity.py",
        'if link is not None and not _is_here(str(link).rpartition(":")[0].strip("[]")):',
        "if False:",
        f"{FOREIGN_FILES}::test_nor_whose_link_a_coordinator_asks",
    ),
    Mutant(
        "names-are-hydras-words",
        "fedgen/experiments/configuration.py",
        "            if not known or not isinstance",
        "            if not isinstance",
        f"{FOREIGN_FILES}::test_names_are_options_and_no_words_of_hydras",
    ),
    Mutant(
        "a-matrix-has-hydras-words",
        "fedgen/experiments/matrix.py",
        """        if not _KEY.match(word) or "$" in word or called or (group and not named):""",
        "        if False:",
        f"{FOREIGN_FILES}::test_a_matrix_has_no_words_of_hydras",
    ),
    Mutant(
        "what-was-left-open-is-any-setting",
        "fedgen/experiments/identity.py",
        """        type(value) is int if name == "rounds" else name in own and value is None""",
        "        True",
        f"{FOREIGN_FILES}::test_what_was_left_open_are_numbers",
    ),
    Mutant(
        "a-directory-names-the-run-that-goes-on",
        "fedgen/experiments/identity.py",
        """    if config.get("resume") is not None:""",
        "    if False:",
        f"{FOREIGN_FILES}::test_a_directory_does_not_name_another_run",
    ),
    Mutant(
        "a-target-is-not-what-its-name-says",
        "fedgen/experiments/configuration.py",
        "            if found != target(default, place) and not factories.is_outside(found):",
        "            if False:",
        f"{FOREIGN_FILES}::test_settings_are_of_what_their_names_say",
    ),
    Mutant(
        "tags-in-yaml",
        "fedgen/files.py",
        "yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:",
        "yaml.ScalarEvent | yaml.CollectionStartEvent) and False:",
        f"{FOREIGN_FILES}::test_yaml_says_what_its_reader_sees",
    ),
    Mutant(
        "of-a-key-that-stands-twice-the-last-counts",
        "fedgen/files.py",
        "            if key.value in known:",
        "            if False:",
        f"{FOREIGN_FILES}::test_yaml_says_what_its_reader_sees",
    ),
    Mutant(
        "names-in-a-matrix-are-anything",
        "fedgen/experiments/matrix.py",
        "        if not isinstance(key, str):",
        "        if False:",
        f"{FOREIGN_FILES}::test_names_in_a_matrix_are_text_and_of_settings",
    ),
    Mutant(
        "a-matrix-names-what-is-called",
        "fedgen/experiments/matrix.py",
        """called = "._" in key_of(word)""",
        "called = False",
        f"{FOREIGN_FILES}::test_names_in_a_matrix_are_text_and_of_settings",
    ),
    Mutant(
        "results-have-an-epsilon-of-their-own",
        "fedgen/reporting/run_dir.py",
        """        if found["epsilon"] != {name:""",
        """        if False and {name:""",
        f"{FOREIGN_FILES}::test_a_lower_epsilon_is_noticed",
    ),
    Mutant(
        "a-benchmark-follows-links",
        "fedgen/experiments/benchmark.py",
        """    check_no_links(place, "run_dir")""",
        "    pass",
        f"{FOREIGN_FILES}::test_nor_is_one_in_a_folder_of_many_runs",
    ),
    Mutant(
        "an-evaluation-follows-a-link",
        "fedgen/experiments/evaluation.py",
        "    if out.is_symlink():",
        "    if False:",
        f"{FOREIGN_FILES}::test_nor_is_one_beside_samples",
    ),
    Mutant(
        "a-sum-that-no-attack-tries-holds",
        "fedgen/sequence.py",
        "            if each.name not in tried:",
        "            if False:",
        f"{SUM_TESTS}::test_a_sum_that_no_attack_would_try_is_named",
    ),
    Mutant(
        "a-folder-hides-its-links",
        "fedgen/files.py",
        "os.walk(folder, onerror=closed)",
        "os.walk(folder)",
        f"{FOREIGN_FILES}::test_a_folder_that_cannot_be_listed_is_refused",
    ),
    Mutant(
        "a-lost-mark-takes-a-gap-back",
        "fedgen/experiments/spent.py",
        "run_dir.unanswered.exists() or set(run_dir.failures()) - set(DROPPED)",
        "run_dir.unanswered.exists()",
        f"{FAULT_TESTS}::test_what_a_failure_showed_is_told_twice_by_a_directory",
    ),
    Mutant(
        "a-benchmark-spends-for-good",
        "fedgen/experiments/matrix.py",
        """    if point.config.privacy.noise == "secure":""",
        "    if False:",
        f"{FOREIGN_FILES}::test_a_matrix_does_not_say_where_rows_or_figures_go",
    ),
    Mutant(
        "a-copy-from-before-a-gap-forgets-it",
        "fedgen/experiments/spent.py",
        "    return bool(told) or (outside and SpentFile.at_home().showed(name))",
        "    return bool(told)",
        f"{FAULT_TESTS}::test_what_a_failure_showed_is_not_forgotten_by_a_directory",
    ),
    Mutant(
        "a-run-that-was-over-costs-less-now",
        "fedgen/privacy/spent.py",
        "with_told(most, [(before or {}) if over else {}])",
        "most",
        f"{SPENT}::test_draws_that_were_shown_count_as_seen",
    ),
    Mutant(
        "a-classifier-is-whatever-is-named",
        "fedgen/evaluation/utility.py",
        '    factories.check({"_target_": model}, "evaluation.classifiers")\n',
        "",
        f"{FOREIGN_FILES}::test_a_classifier_is_one_of_those_that_are_named",
    ),
    Mutant(
        "links-are-followed",
        "fedgen/files.py",
        "                if stat.S_ISLNK(kind):",
        "                if False:",
        f"{FOREIGN_FILES}::test_a_link_is_not_followed",
    ),
    Mutant(
        "weights-are-what-they-are",
        "fedgen/experiments/generation.py",
        'if sha256 != found.get("generator_sha256") or (of_run and sha256 != of_run):',
        "if False:",
        f"{FOREIGN_FILES}::test_other_weights_are_not_taken",
    ),
    Mutant(
        "an-npz-inflates",
        "fedgen/files.py",
        "        if size > _LARGE and",
        "        if False and",
        f"{FOREIGN_FILES}::test_an_npz_that_inflates_is_refused_first",
    ),
    Mutant(
        "yaml-has-aliases",
        "fedgen/files.py",
        '                raise ValueError("it has aliases")',
        "                pass",
        f"{FOREIGN_FILES}::test_yaml_has_no_aliases",
    ),
    Mutant(
        "whatever-a-client-says-that-it-spent",
        "fedgen/federation/rounds.py",
        "not self._is_planned(spend) or not",
        "False and not",
        f"{LYING_CLIENTS}::test_a_lie_is_a_failure_of_one_client[a million]",
    ),
    Mutant(
        "an-account-of-anything",
        "fedgen/federation/rounds.py",
        "if not self._is_planned(account.spend) or most > self._most_rows:",
        "if False:",
        f"{LYING_CLIENTS}::test_what_a_client_says_that_it_spent_is_never_taken_for_less",
    ),
    Mutant(
        "what-left-a-client-unplanned-costs-nothing",
        "fedgen/federation/rounds.py",
        "            self._note(client, NonPrivateDpEvent())  # it left",
        "            # it left",
        f"{LYING_CLIENTS}::test_a_lie_is_a_failure_of_one_client[a million]",
    ),
    Mutant(
        "a-copy-of-a-run-goes-on",
        "fedgen/privacy/ledger.py",
        "if any(self._spend[event] < count for event, count in charged.items()):",
        "if False:",
        f"{SPENT}::test_a_copy_is_behind_and_so_is_a_ledger_that_was_cut",
    ),
    Mutant(
        "spend-stays-in-the-run-directory",
        "fedgen/privacy/ledger.py",
        "            self._outside.charge(self._run, self._client, before, so_far)",
        "            pass",
        f"{SPENT}::test_a_ledger_killed_between_its_two_charges_makes_up_for_it",
    ),
    Mutant(
        "a-page-of-a-run-that-is-not-over-forgets-ledgers",
        "fedgen/experiments/unfinished.py",
        '        own_ledgers(run_dir, identity["run"], clients, seeded),',
        "        {},",
        "tests/experiments/test_unfinished.py::test_its_epsilon_is_that_of_all_its_rounds[one]",
    ),
    Mutant(
        "a-release-is-paid-for-and-lost",
        "fedgen/experiments/release.py",
        "    _check_place(out)\n    run_dir,",
        "    run_dir,",
        "tests/experiments/test_release.py::test_mistakes",
    ),
    Mutant(
        "a-longer-run-is-refused-when-it-has-changed",
        "fedgen/experiments/training.py",
        "enter(ready, run_dir, name)  # which may cost more now",
        "pass",
        "tests/federation/test_longer.py::test_the_budget_of_the_rows_holds",
    ),
    Mutant(
        "a-run-logs-where-its-directory-says",
        "fedgen/experiments/identity.py",
        "    there.logger, there.names.logger = asked.logger, asked.names.logger\n",
        "",
        "tests/reporting/test_loggers.py::test_a_run_that_was_handed_over_logs_where_its_reader_says",
    ),
    Mutant(
        "a-part-of-a-method-calls-a-server",
        "fedgen/factories.py",
        "known = _by_group().get(group, frozenset())",
        "known = own()",
        "tests/reporting/test_loggers.py::test_nor_does_a_part_of_its_method",
    ),
    Mutant(
        "two-copies-spend-as-one",
        "fedgen/privacy/spent.py",
        "if any(count > before.get(event, 0) for event, count in here.items()):",
        "if False:",
        f"{SPENT}::test_each_release_is_counted_whichever_copy_makes_it",
    ),
    Mutant(
        "clients-of-other-rows-add-up",
        "fedgen/privacy/spent.py",
        '"" if self.unit is Unit.RECORD else self.shares',
        '""',
        f"{SPENT}::test_what_a_client_has_cost_adds_up_where_it_has_the_same_rows",
    ),
    Mutant(
        "a-run-that-is-not-over-counts-with-what-it-spent",
        "fedgen/privacy/spent.py",
        "with_told(self.most, self.charged.values())",
        "with_told({}, self.charged.values())",
        f"{SPENT}::test_a_run_counts_with_all_that_it_may_spend_until_it_is_over",
    ),
    Mutant(
        "a-budget-of-one-run",
        "fedgen/experiments/spent.py",
        "spent_together([*others, entry], delta)",
        "spent_together([entry], delta)",
        f"{SPENT}::test_runs_on_the_same_rows_add_up",
    ),
    Mutant(
        "a-resume-changes-before-it-checks",
        "fedgen/experiments/training.py",
        "            check_intact(run_dir, ready, name)",
        "            pass",
        f"{SPENT}::test_a_copy_is_behind_and_so_is_a_ledger_that_was_cut",
    ),
    Mutant(
        "an-answer-of-any-length",
        "fedgen/federation/rounds.py",
        "if (norms > self.method.plan.longest).any():",
        "if False:",
        f"{LYING_CLIENTS}::test_a_lie_is_a_failure_of_one_client[numbers of a million]",
    ),
    Mutant(
        "noise-of-a-client-without-a-bound-is-relied-on",
        "fedgen/experiments/accounts.py",
        "return of_clients and bool(self.without_bound(spends))",
        "return False",
        "tests/experiments/test_accounts.py",
    ),
    Mutant(
        "a-secure-resume-forgets-a-lie",
        "fedgen/experiments/training.py",
        "larger(state.spends.get(client, {}), account.spend)",
        "account.spend",
        f"{LYING_CLIENTS}::test_a_lie_outlives_a_resume_and_stops_none",
    ),
    Mutant(
        "nobody-hears-of-a-client-without-a-bound",
        "fedgen/experiments/accounts.py",
        '"without_bound": sorted(lost),',
        '"without_bound": [],',
        "tests/experiments/test_accounts.py",
    ),
    Mutant(
        "critics-of-a-group-answer-as-its-first-stack",
        CRITICS,
        "_side_by_side([self.weights(state, each, coins) for each in group])",
        "self.weights(state, group[0], coins)",
        f"{GS_WGAN_TESTS}::test_critics_warm_up_and_answer_in_groups_as_by_themselves",
    ),
    Mutant(
        "power-iteration-while-answering",
        CRITICS,
        "critics = self.weights(state, members, coins) if asked else {}\n",
        "critics = self.weights(state, members, coins) if asked else {}\n"
        "                for name, value in power_iteration(critics, stacked=True).items():\n"
        "                    critics[name].copy_(value)\n",
        f"{GS_WGAN_TESTS}::test_answering_changes_no_later_training",
    ),
    Mutant(
        "rows-permuted-by-their-number",
        CRITICS,
        'order = torch.randperm(len(shard), generator=coins.public("subsets"))',
        "order = torch.argsort(shard.images.flatten(1).float().sum(1), stable=True)",
        f"{GS_WGAN_TESTS}::test_replacing_a_row_changes_one_critic",
    ),
    Mutant(
        "error-text-in-a-reply",
        CLIENT,
        "Message(Error(FAILED), reply_to=message)",
        "Message(Error(FAILED, str(error)), reply_to=message)",
        f"{CLIENT_TESTS}::test_what_went_wrong_stays_with_the_client",
    ),
    Mutant(
        "noise-known-from-the-seed-in-secure-mode",
        "fedgen/coins.py",
        "secrets.token_bytes(32), secrets.token_bytes(32), mode)",
        'derived(b"secret"), derived(b"noise"), mode)',
        "tests/test_coins.py",
    ),
    Mutant(
        "opposite-signs-are-nearer",
        BOUNDS,
        "return 2 * math.sqrt(self.largest)",
        "return math.sqrt(2 * self.largest)",
        f"{BOUNDS_TESTS}::test_golden_costs",
    ),
    Mutant(
        "a-bin-or-none",
        BOUNDS,
        "return math.sqrt(2 * self.blocks)",
        "return math.sqrt(self.blocks)",
        f"{BOUNDS_TESTS}::test_golden_costs",
    ),
    Mutant(
        "blocks-counted-as-one",
        BOUNDS,
        "return math.sqrt(self.blocks)",
        "return 1.0",
        f"{BOUNDS_TESTS}::test_diameters_and_radii_are_reached",
    ),
    Mutant(
        "more-signs-than-are-paid-for",
        BOUNDS,
        "flat.abs().topk(min(self.largest, flat.shape[1]), 1)",
        "flat.abs().topk(min(self.largest + 1, flat.shape[1]), 1)",
        f"{BOUNDS_TESTS}::test_whatever_is_handed_over_lies_in_the_set",
    ),
    Mutant(
        "a-vote-as-loud-as-one-likes",
        BOUNDS,
        "return (_finite(rows) > 0).to(rows)",
        "return _finite(rows)",
        f"{BOUNDS_TESTS}::test_whatever_is_handed_over_lies_in_the_set",
    ),
    Mutant(
        "what-is-not-finite-votes",
        BOUNDS,
        "return torch.where(good.view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)",
        "return rows.nan_to_num()",
        f"{BOUNDS_TESTS}::test_whatever_is_handed_over_lies_in_the_set",
    ),
    Mutant(
        "parts-by-labels",
        CRITICS,
        'order = torch.randperm(len(shard), generator=coins.public("subsets"))',
        "order = torch.argsort(shard.labels, stable=True)",
        f"{VOTES_TESTS}::test_one_record_changes_one_teacher_and_its_optimizer",
    ),
    Mutant(
        "parts-drawn-anew-each-round",
        CRITICS,
        "first, subsets = members.start, self.subsets(members, shard, coins)",
        "first, subsets = members.start, self.subsets(members, shard, coins.at(round_))",
        f"{VOTES_TESTS}::test_one_record_changes_one_teacher_and_its_optimizer",
    ),
    Mutant(
        "teachers-learn-from-each-others-loss",
        CRITICS,
        "adam_step(critics, gradients_of(losses, leaves), moments, *self.adam)",
        "adam_step(critics, gradients_of(losses * losses.sum(), leaves), moments, *self.adam)",
        f"{VOTES_TESTS}::test_one_record_changes_one_teacher_and_its_optimizer",
    ),
    Mutant(
        "each-copy-is-an-example",
        PER_EXAMPLE,
        "Kept.of(use, copies) if kept else use",
        "use",
        f"{PER_EXAMPLE_TESTS}::test_copies_are_averaged_before_the_clip",
    ),
    Mutant(
        "copies-add-up",
        PER_EXAMPLE,
        "losses(_single(outputs)).sum() / copies",
        "losses(_single(outputs)).sum()",
        f"{PER_EXAMPLE_TESTS}::test_copies_are_averaged_before_the_clip",
    ),
    Mutant(
        "everybody-knows-which-noise-met-which-row",
        "fedgen/methods/dpdm.py",
        "drawn = torch.from_numpy(coins.secret_uniforms(size, what)).add_(2.0**-54)",
        "drawn = torch.rand(size, generator=coins.public(what), dtype=torch.float64)",
        "tests/methods/test_dpdm.py::test_copies_are_the_clients_secret",
    ),
    Mutant(
        "a-set-that-repeats-is-judged-as-a-generator",
        "fedgen/experiments/evaluation.py",
        "if chosen.judge and distinct is None:",
        "if chosen.judge:",
        "tests/methods/test_psg.py::test_a_run_says_that_there_are_but_so_many_images",
    ),
]


def copy_of(mutant: Mutant | None, folder: Path) -> Path:
    """The package with a mutant in it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            # what is compiled fits as long as its source is not the mutant's
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*-pytest-*"))
        else:
            shutil.copy(source, folder / name)
    if mutant is not None:
        path = folder / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    return folder


class Failures:
    """A pytest plugin that remembers which tests failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest with the report of each phase of a test."""
        if report.failed:
            self.names.append(report.nodeid)


def failed(mutant: Mutant | None, tests: list[str]) -> list[str]:
    """The tests that fail on a copy, in this process. Raises RuntimeError if they cannot be run."""
    if not tests:
        return []
    failures, said = Failures(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(copy_of(mutant, Path(folder)))
        sys.path.insert(0, folder)
        with contextlib.redirect_stdout(said):
            status = pytest.main([*PLAIN, *tests], [failures])
        os.chdir(ROOT)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{' '.join(tests)} did not run:\n{said.getvalue()}")
    return failures.names


def judge(mutant: Mutant) -> list[str]:
    """The tests that noticed."""
    return failed(mutant, [mutant.test])


def _load_what_others_wrote() -> None:
    """All packages that tests import, once: each mutant is judged in a fork of this process, which
    then imports what is ours from its copy."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for path in ROOT.glob("fedgen/**/*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        importlib.import_module(name.removesuffix(".__init__"))
    for name in ("conftest", *LAZY):
        importlib.import_module(name)
    for name in [each for each in sys.modules if each.split(".")[0] in OWN]:
        del sys.modules[name]
    del sys.path[:2]
    gc.freeze()  # the forks' collections need not look at it again


class _Worker(multiprocessing.context.ForkProcess):
    """A fork that may have processes of its own, as tests do that kill a command."""

    def _get_daemon(self) -> bool:
        return False

    def _set_daemon(self, value: bool) -> None:
        del value

    daemon = property(_get_daemon, _set_daemon)  # type: ignore[assignment]


class _Context(multiprocessing.context.ForkContext):
    Process = _Worker


def main() -> None:
    """Judges the mutants that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tests-passed", action="store_true", help="they have, without a mutant")
    asked = parser.parse_args()
    names = asked.names
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"mutants: there is no {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    for mutant in chosen:
        found = (ROOT / mutant.file).read_text().count(mutant.old)
        if found != 1:
            sys.exit(f"mutants: {mutant.name}: {mutant.file} has its line {found} times")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["FEDGEN_TEST_WITHOUT"] = "shrink"  # that a test fails is enough
    _load_what_others_wrote()
    survived = []
    with multiprocessing.pool.Pool(maxtasksperchild=1, context=_Context()) as pool:
        tests = sorted({mutant.test for mutant in chosen})
        whole = pool.apply_async(failed, (None, [] if asked.tests_passed else tests))
        judged = pool.imap(judge, chosen, chunksize=1)
        for mutant, killers in zip(chosen, judged, strict=True):
            if killers:
                print(f"killed {mutant.name} by {killers[0]}", flush=True)
            else:
                survived.append(mutant.name)
                print(f"survived {mutant.name}", flush=True)
        if broken := whole.get():
            sys.exit(f"mutants: {broken[0]} fails without a mutant")
    sys.exit(f"mutants: no test notices {', '.join(survived)}" if survived else 0)


if __name__ == "__main__":
    main()
