"""Two tabletop tasks for vision-language-action policies: reach, or push, the block that an instruction names."""

from palaestra.env.table.tasks import TablePush, TableReach, expert_action

__all__ = ["TablePush", "TableReach", "expert_action"]
