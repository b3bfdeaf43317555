"""The page for TensorFlow's users leaves nothing of the originals out."""

import pathlib
import re

import pytest

_PAGE = pathlib.Path(__file__).resolve().parents[2] / (
  "docs/coming_from_tensorflow1.md"
)

#: From the signatures in TensorFlow 1.15 and 2.21, what all inherit last.
_ORIGINALS = {
  "CrossShardOptimizer": """
    opt reduction name group_assignment
    compute_gradients apply_gradients get_slot get_slot_names variables
    loss var_list grads_and_vars global_step
  """,
  "SyncReplicasOptimizer": """
    opt replicas_to_aggregate total_num_replicas variable_averages
    variables_to_average use_locking name
    compute_gradients apply_gradients get_chief_queue_runner
    get_init_tokens_op make_session_run_hook get_slot get_slot_names variables
    grads_and_vars global_step num_tokens is_chief
    local_step_init_op chief_init_op ready_for_local_init_op
    sync_rep_local_step sync_token_q ConditionalAccumulator
    SparseConditionalAccumulator
    _SyncReplicasOptimizerHook begin after_create_session session coord
  """,
  "ElasticAverageOptimizer": """
    opt num_worker ea_custom_getter communication_period moving_rate rho
    use_locking synchronous name BETA
    compute_gradients apply_gradients get_init_op make_session_run_hook
    swapping_saver get_slot get_slot_names variables
    loss var_list gate_gradients aggregation_method
    colocate_gradients_with_ops grad_loss grads_and_vars global_step
    task_index is_chief
    _ElasticAverageOptimizerHook begin after_create_session session coord
    ElasticAverageCustomGetter worker_device __call__ getter trainable
    collections local_center_variable global_center_variable local_step
  """,
  "Learning rates and losses": """
    exponential_decay natural_exp_decay inverse_time_decay polynomial_decay
    piecewise_constant cosine_decay staircase cycle power alpha
    clip_by_value clip_by_norm clip_by_global_norm l2_loss l2_regularizer
  """,
  "Horovod": """
    DistributedOptimizer Sum Adasum backward_passes_per_step
    average_aggregated_gradients sparse_as_dense compression op
    broadcast_global_variables BroadcastGlobalVariablesHook elastic
  """,
  "ExponentialMovingAverage": """
    decay num_updates zero_debias apply average average_name
    variables_to_restore var_list
  """,
  "What all three inherit": """
    minimize GATE_NONE GATE_OP GATE_GRAPH get_name get_slot get_slot_names
    variables gate_gradients aggregation_method colocate_gradients_with_ops
    grad_loss
  """,
}


_PAGE_TEST = "tensorflow1/test_porting_page.py"
_EMA_TEST = "transforms/test_params_ema.py"
_ELASTIC = "transforms/elastic_average/test_scenarios.py::test_"
_SYNC = (
  "transforms/sync_replicas/test_replay.py::test_recordings_are_reproduced"
)
_SEQUENCES = f"{_PAGE_TEST}::test_each_sequence_of_calls_has_its_chain"
_SLOTS = f"{_PAGE_TEST}::test_slots_and_the_step_are_read_from_the_state"
_GRAPH = f"{_PAGE_TEST}::test_variables_of_the_graph_are_in_the_state"
_GETTER = f"{_PAGE_TEST}::test_variables_of_the_custom_getter_are_in_the_state"
_EACH_COUNTS = f"{_PAGE_TEST}::test_each_gradient_counts_without_sync_replicas"
_RATES = "tensorflow1/test_learning_rates_and_losses.py::test_"
_HOROVOD = "tensorflow1/test_horovod_rows.py::test_"
_TAKES_MEAN = f"{_PAGE_TEST}::test_sync_replicas_averages_arrived_gradients"

#: By section, the beginning of each row that says what to write: the test that runs
#: it, and has the numbers of the original.
_PROGRAMS = {
  "CrossShardOptimizer": {
    "minimize(loss), or compute_gradients": _SEQUENCES,
    "compute_gradients(loss), tf.clip": _SEQUENCES,
    "tf.gradients(loss, tvars), apply": _SEQUENCES,
    "tf.gradients(loss, tvars), tf.clip": _SEQUENCES,
    "any of these with reduction": _SEQUENCES,
    "any of these with group": f"{_PAGE_TEST}::test_groups_are_averaged",
    "AdamWeightDecay": f"{_PAGE_TEST}::test_bert_has_no_bias_correction",
    "LARSOptimizer": f"{_PAGE_TEST}::test_lars_follows_its_rule",
    "AdafactorOptimizer": f"{_PAGE_TEST}::test_adafactor_follows_its_rule",
    "AdamWOptimizer": f"{_PAGE_TEST}::test_adamw_follows_its_rule",
    "LazyAdamOptimizer": f"{_PAGE_TEST}::test_contrib_adams_follow_their_rules",
    "MovingAverageOptimizer": (
      f"{_EMA_TEST}::test_position_in_a_chain_does_not_matter"
    ),
    "ModelAverageOptimizer": (
      f"{_PAGE_TEST}::test_model_averages_follow_their_rule"
    ),
    "DropStaleGradient": _EACH_COUNTS,
    "opt": f"{_PAGE_TEST}::test_the_first_example_trains_as_tensorflow_does",
    "reduction=": (
      "transforms/cross_shard/test_replay.py::test_recorded_trajectories_are_reproduced"
    ),
    "group_assignment": f"{_PAGE_TEST}::test_groups_are_averaged",
    "the shards of": (
      "transforms/cross_shard/test_replay.py::test_recorded_trajectories_are_reproduced"
    ),
    "compute_gradients(loss, var_list": _SEQUENCES,
    "apply_gradients": _SEQUENCES,
    "get_slot(": _SLOTS,
    "get_slot_names": _SLOTS,
    "variables()": _SLOTS,
  },
  "SyncReplicasOptimizer": {
    "opt": _SYNC,
    "replicas_to_aggregate": _SYNC,
    "total_num_replicas": (
      f"{_PAGE_TEST}::test_total_num_replicas_defaults_to_the_size_of_the_axis"
    ),
    "variable_averages": (
      f"{_EMA_TEST}::test_averages_are_the_same_inside_other_transforms"
    ),
    "variables_to_average": (
      "transforms/sync_replicas/test_sync_replicas.py::test_variable_averages_follow_tensorflow"
    ),
    "compute_gradients": _TAKES_MEAN,
    "apply_gradients": _TAKES_MEAN,
    "get_slot(": "states/test_slots.py::test_slots_are_found_inside_wrappers",
    "get_slot_names": (
      "states/test_slots.py::test_slots_are_found_inside_wrappers"
    ),
    "variables()": _GRAPH,
    "local_step_init_op": _GRAPH,
    "chief_init_op": _SYNC,
    "ready_for_local": _GRAPH,
    "sync_rep_local_step": _GRAPH,
    "a ConditionalAccumulator": _SYNC,
    "a SparseConditionalAccumulator": _SYNC,
    "the queue": _GRAPH,
  },
  "ElasticAverageOptimizer": {
    "opt": f"{_ELASTIC}recorded_steps_are_reproduced",
    "num_worker": f"{_ELASTIC}recorded_steps_are_reproduced",
    "communication_period": f"{_ELASTIC}recorded_steps_are_reproduced",
    "moving_rate": f"{_ELASTIC}recorded_defaults_are_reproduced",
    "rho": f"{_ELASTIC}recorded_defaults_are_reproduced",
    "synchronous": f"{_ELASTIC}a_restarted_worker_does_not_wait",
    "the class's constant": f"{_ELASTIC}recorded_defaults_are_reproduced",
    "compute_gradients": f"{_ELASTIC}recorded_steps_are_reproduced",
    "apply_gradients": f"{_PAGE_TEST}::test_global_step_is_found_in_any_chain",
    "get_init_op": f"{_ELASTIC}replicas_that_start_apart_are_reset_to_the_center",
    "swapping_saver": f"{_ELASTIC}center_is_saved",
    "get_slot(": ("states/test_slots.py::test_slots_of_each_replica_are_found"),
    "the variable, local": (
      f"{_PAGE_TEST}::test_elastic_averages_start_at_the_center"
    ),
    "local_center_variable": _GETTER,
    "global_center_variable": _GETTER,
    "local_step": _GETTER,
  },
  "What all three inherit": {
    "minimize": _SEQUENCES,
    "var_list": (
      f"{_PAGE_TEST}::test_parameters_outside_of_var_list_do_not_change"
    ),
    "grad_loss": f"{_PAGE_TEST}::test_grad_loss_is_a_cotangent",
    "global_step": (
      "optimizers/test_global_step.py::test_global_step_is_found_in_any_chain"
    ),
    "get_slot": _SLOTS,
  },
  "Learning rates and losses": {
    "tf.train.exponential": f"{_RATES}each_schedule_is_tensorflows",
    "tf.train.natural": f"{_RATES}each_schedule_is_tensorflows",
    "tf.train.inverse": f"{_RATES}each_schedule_is_tensorflows",
    "tf.train.polynomial": f"{_RATES}each_schedule_is_tensorflows",
    "tf.train.piecewise": f"{_RATES}each_schedule_is_tensorflows",
    "tf.train.cosine": f"{_RATES}each_schedule_is_tensorflows",
    "after cross_shard": f"{_RATES}a_rate_counts_the_steps_before",
    "in sync_replicas": f"{_RATES}a_rate_counts_the_steps_before",
    "in elastic_average": f"{_RATES}rate_counts_the_exchanges_of_all_replicas",
    "tf.clip_by": f"{_RATES}gradients_are_clipped_as_by_tensorflow",
    "scale * tf.nn": f"{_RATES}a_loss_is_regularized_as_by_tensorflow",
  },
  "Horovod": {
    "hvd.DistributedOptimizer": f"{_HOROVOD}gradients_are_reduced_first",
    "compute_gradients": f"{_HOROVOD}gradients_are_reduced_first",
    "op=hvd.Sum": f"{_HOROVOD}gradients_are_reduced_first",
    "op=hvd.Adasum": f"{_HOROVOD}changes_are_combined_by_adasum",
    "backward_passes": f"{_HOROVOD}gradients_of_several_passes_are_summed",
    "average_aggregated": f"{_HOROVOD}gradients_of_several_passes_are_summed",
    "sparse_as_dense": f"{_HOROVOD}sparse_gradients_become_dense",
    "hvd.elastic": _EACH_COUNTS,
  },
  "ExponentialMovingAverage": {
    "decay": f"{_EMA_TEST}::test_position_in_a_chain_does_not_matter",
    "num_updates": f"{_PAGE_TEST}::test_averages_use_num_updates",
    "apply(var_list) after": (
      f"{_EMA_TEST}::test_position_in_a_chain_does_not_matter"
    ),
    "apply(var_list) before": (
      f"{_EMA_TEST}::test_slims_averages_move_before_the_step"
    ),
    "var_list": f"{_EMA_TEST}::test_mask_selects_the_averaged_parameters",
    "averages of moving_mean": (
      f"{_EMA_TEST}::test_statistics_are_averaged_by_the_same_rule"
    ),
    "average(var)": f"{_PAGE_TEST}::test_averages_use_num_updates",
  },
}


def _rows(title):
  """Returns the rows of a section's tables that say what to write."""
  rows = []
  for line in _tables(_section(title)).splitlines():
    first, *_, last = (x.strip() for x in line.strip("|").split(" | "))
    is_head = last == "here" or set(line) <= set("| -")
    if not is_head and last.split(":")[0] not in ("none", "", "|"):
      rows.append(first.replace("`", "").strip())
  return rows


@pytest.mark.parametrize("title", _PROGRAMS)
def test_each_row_has_a_working_program(title):
  programs, used = _PROGRAMS[title], set()
  for row in _rows(title):
    result = [start for start in programs if row.startswith(start)]
    assert result, f"no test runs the row {row!r}"
    used.add(max(result, key=len))
  assert used == programs.keys()
  for place in programs.values():
    file, name = place.split("::")
    text = (_PAGE.parents[1] / "tests" / file).read_text("utf-8")
    assert f"\ndef {name}(" in text, place


def _section(title):
  parts = re.split(r"^## (.*)$", _PAGE.read_text("utf-8"), flags=re.MULTILINE)
  return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def _tables(text):
  return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def _missing(title, text):
  """Returns the names that stand in no code of the section's tables."""
  codes = re.findall(r"`([^`]+)`", _tables(text))
  words = {word for code in codes for word in re.findall(r"\w+", code)}
  introduced = re.findall(r"`(\w+)`:$", text, re.MULTILINE)
  return set(_ORIGINALS[title].split()) - words - set(introduced)


@pytest.mark.parametrize("title", _ORIGINALS)
def test_every_name_of_the_original_is_documented(title):
  text = _section(title)
  text += "".join(re.findall(r"^(?:The hook, )?`\w+`:$", text, re.MULTILINE))
  assert not _missing(title, text)


@pytest.mark.parametrize("title", _ORIGINALS)
def test_undocumented_original_name_is_found(title):
  name = _ORIGINALS[title].split()[0]
  text = re.sub(rf"\b{name}\b", "", _section(title))
  assert name in _missing(title, text)
