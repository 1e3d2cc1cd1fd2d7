"""`sparring tasks`."""

from pathlib import Path

from sparring.commands.arguments import OPTIONS


def add(commands) -> None:
    tasks = commands.add_parser("tasks", help="list the built-in tasks and their ranges", **OPTIONS)
    tasks.add_argument("--sheet", metavar="PNG", help="draw them all into this picture instead")
    tasks.set_defaults(command=_tasks)


def _tasks(arguments, overrides) -> int:
    from sparring.envs.tabletop.tasks import describe

    if arguments.sheet:
        from sparring.gallery import task_rows
        from sparring.record.pictures import write_png
        from sparring.record.sheet import contact_sheet

        print(write_png(Path(arguments.sheet), contact_sheet(task_rows())))
        return 0
    rows = [("task", "goal", "ranges"), *describe()]
    widths = [max(len(str(row[i])) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
