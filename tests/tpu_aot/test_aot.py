"""Tests of how operations are counted in a compiled program's text."""

import aot

_TEXT = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[]{:T(128)} add(%a, %b)
}
ENTRY %main {
  %all-reduce.1 = (f32[8,128]{1,0:T(8,128)S(1)}, /*index=1*/f32[]{:T(128)}) \
all-reduce(%x, %y), channel_id=1, to_apply=%sum
  %get-tuple-element.2 = f32[] get-tuple-element(%all-reduce.1), index=1
  %all-reduce-start = f32[8]{0} all-reduce-start(%z), to_apply=%sum
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %all-gather.3 = f32[8]{0} all-gather(%w), metadata={op_name="psum(x)"}
}
"""


def test_each_collective_counts_once():
  assert aot.count_collectives(_TEXT) == {"all-reduce": 2, "all-gather": 1}
  assert aot.count_ops(_TEXT)["add"] == 1
