"""Tables on standard output."""

from optax_dist.cli import tables


def test_a_wide_row_is_one_line_where_nobody_looks(capsys):
  shown = tables.table("wide")
  cells = [f"column-{i:02}" for i in range(11)]
  for cell in cells:
    shown.add_column(cell)
  shown.add_row(*cells)
  tables.show(shown)
  title, *lines = capsys.readouterr().out.splitlines()
  assert title.rstrip() == "wide"
  assert [line.split() for line in lines if "column-00" in line] == [cells] * 2
