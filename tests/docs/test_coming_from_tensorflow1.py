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
def test_a_name_that_is_left_out_is_found(title):
  name = _ORIGINALS[title].split()[0]
  text = re.sub(rf"\b{name}\b", "", _section(title))
  assert name in _missing(title, text)
