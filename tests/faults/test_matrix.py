"""The fault matrix: each kind, on one process and on two, and each line of *What happens when*, has a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = "tests/faults/"
DAMAGE, DIVERGENCE, OUTPUT_DIR = (f"{FAULTS}test_{name}.py::" for name in ("damage", "divergence", "output_dir"))
OTHERS, TWO, KILL = (f"{FAULTS}test_{name}.py::" for name in ("something_else", "two_processes", "kill"))
CHECKPOINTS, RESUME = "tests/training/test_checkpoints.py::", "tests/distributed/test_resume.py::"
FUNCTIONS, SERVERS, SIGNALS = (f"{FAULTS}test_{name}.py::" for name in ("odd_functions", "odd_servers", "signals"))
DISK = f"{FAULTS}test_full_disk.py::"
OWN_LOOP = "tests/training/test_own_loop.py::"
WRONG, BAD = f"{FAULTS}test_wrong_inputs.py::", "tests/training/test_bad_input.py::"
ARGUMENTS, HUB = "tests/training/test_trainer_arguments.py::", "tests/reporting/test_hub.py::"

MATRIX: dict[str, tuple[str, str]] = {
    "kill": (
        f"{KILL}test_killed_runs_end_as_one_that_was_left_alone",
        f"{KILL}test_two_killed_processes_end_as_two_that_were_left_alone",
    ),
    "disk": (
        f"{CHECKPOINTS}test_a_full_disk_leaves_the_previous_checkpoint_loadable",
        f"{RESUME}test_one_ranks_full_disk_ends_all_and_leaves_the_previous_checkpoint",
    ),
    "damage": (
        f"{DAMAGE}test_damage_to_any_file_is_said_by_its_name",
        f"{TWO}test_both_fall_back_when_a_file_of_one_is_damaged",
    ),
    "divergence": (
        f"{DIVERGENCE}test_what_is_not_finite_stops_the_run_before_it_is_saved",
        f"{TWO}test_both_stop_for_what_is_not_finite_on_one",
    ),
    "hang": (
        f"{FUNCTIONS}test_each_is_scored_or_refused_by_name",
        f"{TWO}test_a_reward_that_hangs_on_one_ends_both",
    ),
    "signal": (
        f"{SIGNALS}test_a_signal_ends_the_run_with_a_checkpoint",
        f"{RESUME}test_sigterm_to_one_rank_saves_a_checkpoint_from_which_the_run_goes_on",
    ),
    "resume with something else": (
        f"{OTHERS}test_a_change_is_said_with_what_is_in_force",
        f"{TWO}test_what_changed_is_said_once",
    ),
    "concurrent run": (
        f"{OUTPUT_DIR}test_a_second_run_in_the_same_directory_is_refused",
        f"{TWO}test_a_directory_in_use_is_refused_on_every_rank",
    ),
    "malicious file": (
        f"{CHECKPOINTS}test_code_hidden_in_a_checkpoint_does_not_run",
        f"{TWO}test_what_cannot_go_on_is_refused_on_both",
    ),
}
"""By the kind of fault: the test of one process, and the one of two."""

DOCUMENTED: dict[str, dict[str, str]] = {
    "Divergence": {
        "A score is NaN": f"{DIVERGENCE}test_what_is_not_finite_stops_the_run_before_it_is_saved",
        "A log-probability, KL": f"{DIVERGENCE}test_what_is_not_finite_stops_the_run_before_it_is_saved",
        "A loss or a gradient": f"{DIVERGENCE}test_what_is_not_finite_stops_the_run_before_it_is_saved",
        "A weight is not finite": f"{DIVERGENCE}test_weights_that_are_not_finite_are_never_saved",
        "One NaN score": f"{DIVERGENCE}test_one_nan_of_ten_updates_is_left_out_and_said",
        "A loss or gradient that": f"{DIVERGENCE}test_what_is_not_finite_is_skipped_and_counted",
        "Five skipped updates": f"{DIVERGENCE}test_too_many_skipped_updates_in_a_row_stop",
        "The best checkpoint was": f"{DAMAGE}test_a_damaged_best_model_is_not_taken_for_the_end",
    },
    "Damage": {
        "A kill or a full disk": f"{CHECKPOINTS}test_a_full_disk_leaves_the_previous_checkpoint_loadable",
        "A file of a checkpoint": f"{DAMAGE}test_damage_to_any_file_is_said_by_its_name",
        "`log_history.jsonl` is missing": f"{FAULTS}test_history.py::test_without_the_file_the_end_of_the_log_is_left",
        "A number in": f"{DAMAGE}test_values_that_no_run_can_have_are_refused_by_name",
        "A checkpoint holds code": f"{CHECKPOINTS}test_code_hidden_in_a_checkpoint_does_not_run",
        "A checkpoint's update comes": f"{OUTPUT_DIR}test_a_checkpoint_that_is_written_again_holds_nothing_of_before",
        "One of several processes": f"{TWO}test_a_kill_in_the_middle_of_a_save_costs_nothing",
        "`save_only_model=True`": f"{ARGUMENTS}test_save_only_model_leaves_out_what_resuming_needs",
    },
    "The directory of another run": {
        "A new run starts in": f"{OUTPUT_DIR}test_a_new_run_does_not_start_among_the_checkpoints_of_another",
        "A new run starts among": f"{OUTPUT_DIR}test_a_directory_without_a_finished_checkpoint_is_free",
        "A checkpoint of another run": f"{OUTPUT_DIR}test_rotation_leaves_the_checkpoints_of_others",
        "A run goes on from": f"{OUTPUT_DIR}test_going_on_from_an_earlier_one_gives_the_later_ones_up",
        "A resume is refused": f"{OTHERS}test_what_cannot_go_on_is_refused",
        "A checkpoint is resumed": f"{OUTPUT_DIR}test_a_run_goes_on_in_another_directory_if_that_is_free",
        "A second run starts": f"{OUTPUT_DIR}test_a_second_run_in_the_same_directory_is_refused",
        "A notebook still holds": f"{OWN_LOOP}test_two_trainers_one_after_the_other_in_one_directory",
        "A run was killed": f"{OUTPUT_DIR}test_the_lock_names_its_holder_and_ends_with_it",
        "The file system has no": f"{OUTPUT_DIR}test_without_locks_a_warning_says_so",
    },
    "Hangs": {
        "A reward function takes": f"{FUNCTIONS}test_each_is_scored_or_refused_by_name",
        "A server does not answer": f"{SERVERS}test_it_ends_in_time_and_in_one_sentence",
        "A server answers with": f"{SERVERS}test_it_ends_in_time_and_in_one_sentence",
        "A vLLM server dies": "tests/generation/test_vllm.py::test_a_server_that_does_not_generate_is_one_clear_error",
    },
    "A full disk": {
        "No space, or a quota": f"{DISK}test_a_checkpoint_without_room_names_itself_and_the_one_that_is_whole",
        "The same on one of": f"{RESUME}test_one_ranks_full_disk_ends_all_and_leaves_the_previous_checkpoint",
        "No space for what is logged": f"{DISK}test_no_room_for_what_is_printed_or_logged_is_said_too",
        "No space for the final": f"{DISK}test_a_first_checkpoint_and_a_final_model_without_room",
        "A kill while a model": f"{DISK}test_what_a_killed_save_leaves_is_deleted_by_the_next_save_and_the_next_run",
    },
    "Resuming with something else": {
        "More updates": f"{OTHERS}test_more_prompts_are_trained_on",
        "Not more updates": f"{OTHERS}test_a_change_is_said_with_what_is_in_force",
        "Another learning rate": f"{OTHERS}test_a_change_is_said_with_what_is_in_force",
        "Another number of prompts, at the end": f"{OTHERS}test_passes_that_are_over_before_the_updates_are_go_on",
        "Another number of prompts, in the middle": f"{OTHERS}test_more_prompts_are_trained_on",
        "Other prompts": f"{OTHERS}test_a_change_is_said_with_what_is_in_force",
        "Another `seed`": f"{OTHERS}test_a_change_is_said_with_what_is_in_force",
        "Other episodes": f"{OTHERS}test_what_cannot_go_on_is_refused",
        "Another optimizer": f"{OTHERS}test_what_cannot_go_on_is_refused",
        "Another number of processes": f"{RESUME}test_another_number_of_processes_goes_on",
        "In the middle of learning": f"{FAULTS}test_partial_update.py::test_an_update_is_finished_as_it_was_begun",
        "`overwrite_output_dir=True`": f"{OUTPUT_DIR}test_overwriting_and_resuming_contradict_each_other",
    },
    "Wrong inputs": {
        "An argument of another": f"{WRONG}test_a_wrong_value_is_refused_by_name",
        "Arguments that cannot": f"{WRONG}test_a_combination_that_cannot_be_is_refused",
        "A policy, reference": "tests/models/test_capabilities.py::"
        "test_a_model_with_one_weight_that_is_not_finite_is_refused",
        "Something else to": f"{OWN_LOOP}test_what_is_no_update_changes_nothing",
        "Something else than": f"{WRONG}test_something_else_is_refused_before_a_model_is_loaded",
        "An optimizer, a schedule": f"{WRONG}test_what_cannot_be_given_is_refused_before_a_model_is_loaded",
        "A tracker that is not": f"{WRONG}test_a_tracker_that_is_not_installed_is_refused_with_what_to_install",
        "A tracker without its key": "tests/reporting/test_trackers.py::"
        "test_comet_without_a_key_is_refused_before_a_model_is_loaded",
        "A repository of the hub": f"{HUB}test_a_hub_that_gives_no_repository_is_said_before_training",
        "A hub that fails": f"{HUB}test_a_push_that_fails_loses_nothing",
        "A `metric_for_best_model`": f"{FAULTS}test_best_metric.py::"
        "test_it_is_said_at_the_first_evaluation_and_the_run_goes_on",
        "A prompt that says nothing": f"{WRONG}test_what_the_models_must_tell_is_refused_at_construction",
        "A column named like": f"{WRONG}test_what_the_models_must_tell_is_refused_at_construction",
        "A reward function that requires": f"{BAD}test_columns_that_reward_functions_require_are_missed_first",
        "A reward function that returns": f"{BAD}test_wrong_reward_function_is_found_in_the_first_rollout",
        "A wrong option": "tests/cli/test_user_errors.py::test_a_mistake_is_one_sentence",
    },
}
"""By section of the page: how a line of its table begins, and the test in which that was seen."""


def rows(section: str) -> Iterator[str]:
    """The lines of the tables of a section, without their heads."""
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line.removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    yield from (line for line in lines if not line.startswith(("What happen", "What is passed")))


def is_there(test: str) -> bool:
    path, name = test.split("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


@pytest.mark.parametrize("fault", MATRIX)
def test_each_fault_is_made_on_one_process_and_on_two(fault: str) -> None:
    assert [test for test in MATRIX[fault] if not is_there(test)] == []


@pytest.mark.parametrize("section", DOCUMENTED)
def test_each_line_of_the_page_was_seen(section: str) -> None:
    beginnings = DOCUMENTED[section]
    unseen = [row for row in rows(section) if sum(row.startswith(beginning) for beginning in beginnings) < 1]
    gone = [beginning for beginning in beginnings if not any(row.startswith(beginning) for row in rows(section))]
    assert (unseen, gone, [test for test in beginnings.values() if not is_there(test)]) == ([], [], [])
